"""The table of advice: lines to paste that the library prints, what triggers each, and the tests that pasted it.

A line to paste is code with a call, a command, a setting of the environment, or an option that a sentence asks for. It is a row
here, and the printing code fills the row in: ``advise("train.preset", saved="plan.yaml")``.
`tests/test_house_advice.py` walks the printing code and refuses a line that stands elsewhere.

To add a row:

1. Write the row below, among those of its room. The text is a template of `str.format`: ``{step}`` is a field, ``{{`` a brace.
   It ends where the pasted line ends; the sentence around it stays in the printing code, or is part of the row where it is fixed.
2. Print it by ``advise(key, field=...)`` with the key as a literal, so that `tests/test_house_advice.py` finds it.
3. Write tests with at least three unlike triggers (functions, or cases of one parametrised function) and name them in the row.
   Each makes the trigger, takes the line out of what was printed by ``pasted(key, printed)`` of `tests/pasting.py`, which returns
   it as it stands, runs it, and measures what was promised.

What cannot be proved in one of the classes below has no row: print it as a question, without a line to paste.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Proof(Enum):
    """How a row was put to the test."""

    TRAINED = "trained here"
    COMPILED = "compiled for the target"
    SIMULATED = "run in the simulator"
    GPU_CHECK = "asked by `make gpu-check`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One line to paste.

    Attributes:
        key: Its name in the table.
        trigger: What must be the case for it to be printed.
        text: What is printed, with named fields.
        proof: How it was put to the test.
        tests: The tests that paste it, such as ``tests/test_advice_steps.py::test_wrap``; for `Proof.GPU_CHECK` at least one
            function of ``tools/gpu_questions.py`` among them.
    """

    key: str
    trigger: str
    text: str
    proof: Proof
    tests: tuple[str, ...]

    @property
    def fields(self) -> frozenset[str]:
        """Names of what is filled in."""
        return frozenset(name for _, name, _, _ in string.Formatter().parse(self.text) if name)

    def filled(self, **fields: Any) -> str:
        """The text as it is printed.

        Raises:
            TypeError: other fields than the text has.
        """
        if fields.keys() != self.fields:
            msg = f"The advice {self.key} has the fields {sorted(self.fields)}, got {sorted(fields)}."
            raise TypeError(msg)
        return self.text.format(**fields)

    @property
    def pattern(self) -> str:
        """A regular expression of all texts that it can print."""
        expression, seen = "", set[str]()
        for fixed, name, _, _ in string.Formatter().parse(self.text):
            expression += re.escape(fixed)
            if name:
                expression += f"(?P={name})" if name in seen else f"(?P<{name}>.+?)"
                seen.add(name)
        return expression


# Data on its way to the device

_DATA = (
    Advice(
        key="prefetch.least",
        trigger="`jm.prefetch` is asked for fewer than two batches",
        text="jm.prefetch(loader, batches=2)",
        proof=Proof.TRAINED,
        tests=("tests/test_prefetch.py::test_fewer_than_two_batches_are_refused",),
    ),
)

# What a step donates, and where its state is

_DONATION = (
    Advice(
        key="donation.lay_as_returned",
        trigger="an argument is donated, and comes in another sharding than it is returned in, which needs less of a device",
        text="{argument} = jax.device_put({argument}, jm.jit_step({step}).lower({call}).compile().output_shardings{place})",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_steps.py::test_moments_are_laid_as_the_step_returns_them",),
    ),
    Advice(
        key="donation.pin_returned",
        trigger="a plain step's argument is donated, and is returned in another sharding than it comes in, which needs more",
        text="jm.jit_step({step}, state_shardings=jax.tree.map(lambda x: x.sharding, {argument}))",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_steps.py::test_a_state_is_returned_as_it_comes",),
    ),
    Advice(
        key="script.maker",
        trigger="a script defines its step and never calls it",
        text="def make():\n        return {step}, (state, batch)",
        proof=Proof.COMPILED,
        tests=("tests/test_cli_inspect.py::test_a_step_that_is_never_called_is_named_with_what_to_add",),
    ),
    Advice(
        key="call.arguments",
        trigger="a step is to be planned or measured without its arguments, or with too few or too many",
        text="{call}({step}, {arguments})",
        proof=Proof.COMPILED,
        tests=("tests/test_step_memory.py::test_a_step_without_its_arguments_is_shown_the_call",),
    ),
    Advice(
        key="alive.let_go",
        trigger="a variable of the script holds a second copy of an argument",
        text="del {name}",
        proof=Proof.TRAINED,
        tests=("tests/test_cli_alive.py::test_a_second_copy_of_the_state_is_named",),
    ),
    Advice(
        key="causes.microbatches",
        trigger="gradients or losses of several steps or microbatches are added up",
        text="jm.StepPolicy(microbatches={count})",
        proof=Proof.TRAINED,
        tests=(
            "tests/test_causes.py::test_gradients_kept_from_step_to_step",
            "tests/test_causes.py::test_gradients_in_a_python_loop",
            "tests/test_causes.py::test_losses_added_up_in_a_python_loop",
            "tests/test_causes.py::test_gradients_side_by_side",
        ),
    ),
    Advice(
        key="causes.split_batch",
        trigger="a step on several devices is given a batch that each of them holds whole",
        text='{batch} = jax.device_put({batch}, jax.NamedSharding({mesh}, jax.P("{axis}")))',
        proof=Proof.TRAINED,
        tests=("tests/test_causes.py::test_a_batch_that_is_whole_on_each_device",),
    ),
    Advice(
        key="causes.split_rows",
        trigger="a value has all rows of a batch on each device, though the batch is divided",
        text="jax.lax.with_sharding_constraint(value, jax.P({axis}))",
        proof=Proof.TRAINED,
        tests=("tests/test_causes.py::test_a_value_that_is_whole_on_each_device",),
    ),
    Advice(
        key="causes.cpu_scheduler",
        trigger="another schedule of a CPU's program needs less",
        text="XLA_FLAGS=--{scheduler}={order}",
        proof=Proof.COMPILED,
        tests=("tests/test_causes.py::test_temporaries_that_the_cpu_holds_at_once",),
    ),
    Advice(
        key="donation.nothing",
        trigger="a step of this library is given arrays that were donated before",
        text="jm.jit_step({step}, donate_argnames=())",
        proof=Proof.TRAINED,
        tests=("tests/test_donation.py::test_what_was_donated_and_is_passed_again_is_named",),
    ),
    Advice(
        key="donation.argnames",
        trigger="a jit that is there returns arguments updated that it does not donate",
        text="donate_argnames=({names})",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_donation.py::test_what_is_held_twice_is_donated_by_the_option",),
    ),
    Advice(
        key="donation.argnums",
        trigger="the same of arguments in ``*args``, which have no names",
        text="donate_argnums=({places})",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_donation.py::test_what_has_no_name_is_donated_by_position",),
    ),
    Advice(
        key="donation.equinox",
        trigger="a step that Equinox jitted returns arguments updated that it does not donate",
        text='jm.jit_step({step}, "donate")',
        proof=Proof.TRAINED,
        tests=("tests/test_advice_steps.py::test_equinox_donates_what_comes_back",),
    ),
    Advice(
        key="donation.own_copy",
        trigger="the runtime copied a donated array in the first step, since something outside of JAX holds its memory",
        text="np.array(x)",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_donation.py::test_what_is_copied_as_printed_is_no_view",),
    ),
    Advice(
        key="donation.debug_nans",
        trigger="an argument is donated while `jax_debug_nans` is on",
        text="jax.config.update('jax_debug_nans', False)",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_steps.py::test_debug_nans_is_turned_off",),
    ),
)

_SHARDING = (
    Advice(
        key="devices.apart",
        trigger="one argument of a step is on one device, another on several",
        text="{argument} = jax.device_put({argument}, jax.NamedSharding({other}.sharding.mesh, jax.P()))",
        proof=Proof.COMPILED,
        tests=("tests/test_target_options.py::test_arguments_on_different_devices_are_placed_together",),
    ),
    Advice(
        key="sharding.set_mesh",
        trigger="a policy has a sharding, and no mesh is set where the step is called",
        text="jax.set_mesh(jm.make_mesh({axes}))",
        proof=Proof.TRAINED,
        tests=("tests/test_sharding_refusals.py::test_without_a_mesh_the_line_that_sets_one_is_shown",),
    ),
    Advice(
        key="sharding.move",
        trigger="a state is placed otherwise than the policy's sharding has it",
        text="{names} = jax.device_put({whole}, jm.infer_shardings({whole}, {mesh}, {policy}))",
        proof=Proof.TRAINED,
        tests=("tests/test_sharding_refusals.py::test_a_state_that_lies_elsewhere_is_moved_by_the_line_that_is_shown",),
    ),
    Advice(
        key="state_offload.place",
        trigger="a policy has the optimizer's state on the host, and it is on the device",
        text="{names} = jm.place_state({step}, {names})",
        proof=Proof.TRAINED,
        tests=("tests/test_state_offload.py::test_a_state_on_the_device_is_moved_by_the_line_that_is_shown",),
    ),
    Advice(
        key="sharding.mesh_of_state",
        trigger="the same, where the mesh is that of `state_shardings`: what stands for the mesh in that line",
        text="jax.tree.leaves(state_shardings)[0].mesh",
        proof=Proof.TRAINED,
        tests=("tests/test_sharding_refusals.py::test_the_mesh_of_state_shardings_is_in_the_line_that_is_shown",),
    ),
    Advice(
        key="sharding.rules",
        trigger="the same, of a policy whose sharding is rules: what stands for the policy in that line",
        text="jm.StepPolicy(sharding={rules})",
        proof=Proof.TRAINED,
        tests=("tests/test_sharding_refusals.py::test_a_state_that_lies_elsewhere_is_moved_by_the_line_that_is_shown",),
    ),
    Advice(
        key="sharding.move_modules",
        trigger="the same, of a state with Equinox modules, whose functions `jax.device_put` does not take",
        text="{names} = eqx.filter_shard({whole}, jm.infer_shardings({whole}, {mesh}, {policy}))",
        proof=Proof.TRAINED,
        tests=("tests/test_sharding_refusals.py::test_models_with_functions_are_moved_by_the_line_that_is_shown",),
    ),
)

# Lines to train by a plan

_UNNAMED = "tests/test_cli_unedited.py::test_the_policy_of_a_step_without_a_name_is_read_as_it_was_saved"
_TRAIN = (
    Advice(
        key="train.wrap",
        trigger="a plan chose a policy for the step that a script calls",
        text="{step} = jm.jit_step({of}, {policy})",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_plans.py::test_the_lines_to_train_are_pasted_as_printed",),
    ),
    Advice(
        key="train.policy",
        trigger="such a plan was not saved",
        text="jm.StepPolicy({settings})",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_plans.py::test_the_lines_to_train_are_pasted_as_printed",),
    ),
    Advice(
        key="targets.install",
        trigger="a target's compiler is not installed",
        text="jaxmem targets --install {kind}",
        proof=Proof.COMPILED,
        tests=("tests/test_cli_targets.py::test_what_is_printed_installs_a_compiler",),
    ),
    Advice(
        key="targets.beside_jax",
        trigger="the same, where JAX itself is to load it",
        text='pip install "jax[{extra}]=={version}"',
        proof=Proof.COMPILED,
        tests=("tests/test_cli_targets.py::test_what_is_printed_installs_a_compiler",),
    ),
    Advice(
        key="train.named",
        trigger="a plan chose a policy and places",
        text="policy = {policy}",
        proof=Proof.TRAINED,
        tests=(
            "tests/test_advice_calls.py::test_the_lines_of_a_plan_with_places_are_pasted",
            _UNNAMED,
        ),
    ),
    Advice(
        key="train.preset",
        trigger="such a plan was saved as a preset",
        text='jm.load_preset("{saved}")',
        proof=Proof.TRAINED,
        tests=(
            "tests/test_advice_plans.py::test_the_lines_to_train_are_pasted_as_printed",
            _UNNAMED,
        ),
    ),
    Advice(
        key="train.load_plan",
        trigger="such a plan was saved whole",
        text='plan = jm.load_plan("{saved}")',
        proof=Proof.TRAINED,
        tests=(
            "tests/test_advice_plans.py::test_the_lines_to_train_are_pasted_as_printed",
            _UNNAMED,
        ),
    ),
    Advice(
        key="train.monitor",
        trigger="such a plan was saved whole",
        text="monitor = jm.MemoryMonitor(plan=plan)  # and monitor(i, metrics) after each step",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_plans.py::test_the_lines_to_train_are_pasted_as_printed",),
    ),
)

# Events

_RECOMPILATION = (
    Advice(
        key="recompilation.jit_once",
        trigger="a program is compiled at step after step, and no argument is known to have changed",
        text="Make it once, above the loop, and pass what changes from step to step as an argument.",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_events.py::test_a_step_made_anew_is_made_once",),
    ),
    Advice(
        key="recompilation.learn",
        trigger="a program that this library did not make is compiled again",
        text="Wrap it by jm.jit_step, above the loop: the event then names the argument.",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_events.py::test_a_wrapped_step_names_the_argument_that_changed",),
    ),
    Advice(
        key="recompilation.rows",
        trigger="arrays of a step of this library come in other shapes",
        text="Keep {arrays}: drop or pad what is shorter, such as the last batch.",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_events.py::test_arrays_that_keep_their_shapes_compile_once",),
    ),
    Advice(
        key="recompilation.dtype",
        trigger="an array or a Python number of such a step comes in another dtype",
        text='jnp.asarray({argument}, "{dtype}")',
        proof=Proof.TRAINED,
        tests=("tests/test_advice_events.py::test_an_argument_of_one_dtype_compiles_once",),
    ),
    Advice(
        key="recompilation.static",
        trigger="a static argument of such a step has another value",
        text="Take {argument} out of the static arguments, and pass it as an array.",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_events.py::test_what_is_static_no_more_compiles_once",),
    ),
)

# Plans

_PLANS = (
    Advice(
        key="plan.own_checkpoints",
        trigger="the loss's own checkpoints were left alone, and more was to be saved",
        text="--search own_checkpoints (search={{'own_checkpoints': True}} of jm.plan)",
        proof=Proof.TRAINED,
        tests=("tests/test_plan_own_checkpoints.py::test_what_a_plan_of_a_script_prints_is_pasted",),
    ),
    Advice(
        key="plan.donate",
        trigger="a step that no jit of the user's donates for returns arguments updated, and donating them saves memory",
        text="--search donate (search={{'donate': True}} of jm.plan)",
        proof=Proof.COMPILED,
        tests=("tests/test_plan_donation.py::test_what_a_plan_says_of_donation_is_typed_and_pasted",),
    ),
    Advice(
        key="plan.share",
        trigger="nothing fits into the share of an absent GPU that JAX takes, and the nearest step fits into a larger one",
        text="XLA_CLIENT_MEM_FRACTION={share}",
        proof=Proof.COMPILED,
        tests=("tests/test_plan_verdict.py::test_a_larger_share_of_the_gpu_that_is_printed_fits",),
    ),
    Advice(
        key="plan.search",
        trigger="nothing fits, and microbatches, offload, chunks or state_offload were not tried and can be had",
        text="--search {search}",
        proof=Proof.COMPILED,
        tests=(
            "tests/test_plan_verdict.py::test_a_search_that_is_printed_can_be_had_and_needs_less",
            "tests/test_plan_chunks.py::test_chunks_that_are_proposed_can_be_had_and_fit",
        ),
    ),
)

# Gradients that a package takes

_GRADIENTS = (
    Advice(
        key="gradients.all",
        trigger="A policy for gradients on a step that takes none through this library",
        text="jm.jit_step({step}, policy, gradients='all')",
        proof=Proof.TRAINED,
        tests=("tests/test_all_gradients.py::test_a_policy_that_reaches_nothing_says_what_would",),
    ),
)

# Settings of XLA's client

_ENVIRONMENT = (
    Advice(
        key="environment.set",
        trigger="a variable has a text that JAX or XLA cannot read, a value out of range, or one that goes wrong with another",
        text="export {name}={value}",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_environment.py::test_a_variable_that_is_set_as_printed",),
    ),
    Advice(
        key="environment.pop",
        trigger="a preset sets in a script what a variable sets otherwise",
        text="os.environ.pop({name})",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_environment.py::test_a_variable_that_is_popped_as_printed",),
    ),
    Advice(
        key="environment.unset",
        trigger="a variable is one too many: its other name is set, an option wins over it, or nothing uses it",
        text="unset {name}",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_environment.py::test_a_variable_that_is_unset_as_printed",),
    ),
    Advice(
        key="environment.option",
        trigger="`jax_pjrt_client_create_options` has a value that the GPU plugin refuses, or one that leaves nothing to CUDA",
        text='jax.config.update("jax_pjrt_client_create_options", {options})',
        proof=Proof.TRAINED,
        tests=("tests/test_advice_environment.py::test_an_option_that_is_set_as_printed",),
    ),
)

# Scripts, and steps in them that are not under a jit

_HOW = "tests/test_cli_arguments.py::"
_FOUND = "tests/test_cli_found.py::"
_PMAPPED = f"{_FOUND}test_a_pmapped_step_is_stopped_with_the_jit_to_write"
_PMAPPED_METHOD = f"{_FOUND}test_a_pmapped_method_is_stopped_with_the_jit_to_write"
_SCRIPTS = (
    Advice(
        key="script.either",
        trigger="neither a script nor a module is typed",
        text="jaxmem {command} train.py, or jaxmem {command} -m package.train",
        proof=Proof.COMPILED,
        tests=(f"{_HOW}test_what_is_typed_for_want_of_a_script_works",),
    ),
    Advice(
        key="script.arguments",
        trigger="a script ends by itself before its step, as one does without its own arguments",
        text="jaxmem {typed} -- --steps 10",
        proof=Proof.COMPILED,
        tests=(f"{_HOW}test_a_script_without_its_arguments_ends_with_how_to_give_them",),
    ),
    Advice(
        key="script.module",
        trigger="a script that is typed by its path imports as a module of a package",
        text="jaxmem {command} -m {module}",
        proof=Proof.COMPILED,
        tests=(f"{_HOW}test_a_module_of_a_package_that_is_typed_by_its_path_is_named",),
    ),
    Advice(
        key="script.module_elsewhere",
        trigger="the same, in another folder than that around the package",
        text="cd {folder} && jaxmem {command} -m {module}",
        proof=Proof.COMPILED,
        tests=(f"{_HOW}test_a_module_of_a_package_that_is_typed_by_its_path_is_named",),
    ),
    Advice(
        key="train.around",
        trigger="a plan chose a policy for a step that a package jits",
        text='trained = jm.apply_policy({call}, {policy}, gradients="all")',
        proof=Proof.TRAINED,
        tests=(f"{_FOUND}test_the_step_of_a_package_is_planned_and_trained_by_the_printed_line",),
    ),
    Advice(
        key="step.loop",
        trigger="a loop of jax.lax that no jit is around takes the gradient",
        text="lambda {data}: jax.lax.{loop}({arguments})",
        proof=Proof.TRAINED,
        tests=(f"{_FOUND}test_a_loop_that_runs_by_itself_is_the_step_and_is_written_as_it_can_be_jitted",),
    ),
    Advice(
        key="step.pmap",
        trigger="a function under jax.pmap takes the gradient",
        text='    mesh = jax.make_mesh((jax.device_count(),), ("{axis}",), axis_types=(jax.sharding.AxisType.Auto,))\n'
        "    step = jax.shard_map({function}, mesh=mesh, in_specs={specs}, out_specs=jax.P(), check_vma=False)\n"
        "    step = jax.jit({arguments})",
        proof=Proof.TRAINED,
        tests=(_PMAPPED, _PMAPPED_METHOD),
    ),
    Advice(
        key="step.pmap.divided",
        trigger="an argument of such a function that is divided among the devices",
        text='jax.P("{axis}")',
        proof=Proof.TRAINED,
        tests=(_PMAPPED,),
    ),
    Advice(
        key="step.pmap.partial",
        trigger="such a function is a partial",
        text="functools.partial({function}, {arguments})",
        proof=Proof.TRAINED,
        tests=(_PMAPPED,),
    ),
    Advice(
        key="step.pmap.static",
        trigger="such a function has static arguments",
        text="lambda {names}: {function}({arguments})",
        proof=Proof.TRAINED,
        tests=(_PMAPPED,),
    ),
)

# How a GPU's memory is taken

_MEMORY = (
    Advice(
        key="memory.environment",
        trigger="a pool had enough free but in pieces, or could not grow by enough in one piece",
        text='jm.apply_environment("{preset}")',
        proof=Proof.SIMULATED,
        tests=("tests/test_advice_memory.py::test_a_run_that_its_pool_ended_goes_on_as_printed",),
    ),
)

# Steps, policies and meshes

_CALLS = (
    Advice(
        key="step.under",
        trigger="a step needs more than there is, or what it returns is whole on each device",
        text="jm.jit_step({step}, {policy})",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_calls.py::test_a_step_is_put_under_the_policy_that_an_event_names",),
    ),
    Advice(
        key="step.made",
        trigger="a failed step would need less under a policy, or a log names the step that failed",
        text="step = jm.jit_step({arguments})",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_calls.py::test_a_failed_step_is_made_as_a_log_advises",),
    ),
    Advice(
        key="preset.load",
        trigger="presets are listed, or one is expected where there is none",
        text="jm.load_preset({names})",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_calls.py::test_a_preset_is_loaded_as_printed",),
    ),
    Advice(
        key="mesh.make",
        trigger="axes do not fit the devices, or there is no mesh with them",
        text="jm.make_mesh({axes})",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_calls.py::test_a_mesh_is_made_as_printed",),
    ),
    Advice(
        key="monitor.call",
        trigger="a monitor is expected and something else was given, or a plan is to be shown by one",
        text="jm.MemoryMonitor({arguments})",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_calls.py::test_a_monitor_is_made_as_printed",),
    ),
    Advice(
        key="guard.call",
        trigger="`jm.oom_guard` has no monitor, something else, or a generator",
        text="jm.oom_guard({arguments})",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_calls.py::test_a_guard_is_made_as_printed",),
    ),
    Advice(
        key="sharding.of_state",
        trigger="`state_shardings` has another tree than the state",
        text="jax.tree.map(lambda x: x.sharding, {state})",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_calls.py::test_shardings_are_those_of_the_state",),
    ),
    Advice(
        key="sharding.put",
        trigger="a state is elsewhere than `state_shardings` asks",
        text="{state} = jax.device_put({state}, state_shardings)",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_calls.py::test_a_state_is_put_where_it_is_pinned",),
    ),
    Advice(
        key="donation.copy",
        trigger="a buffer is in two places of which one is donated",
        text="{state} = jax.tree.map(jnp.copy, {state})",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_calls.py::test_a_shared_buffer_is_copied_as_printed",),
    ),
    Advice(
        key="loss.weighted",
        trigger="a loss or a value beside it has no mean over microbatches",
        text="jm.weighted({arguments})",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_calls.py::test_a_loss_says_its_weight_as_printed",),
    ),
    Advice(
        key="loss.batch",
        trigger="which argument of a loss is the batch is not clear",
        text="jm.value_and_grad({loss}, batch_argnames={names})",
        proof=Proof.TRAINED,
        tests=(
            "tests/test_advice_calls.py::test_the_batch_is_named_as_printed",
            "tests/test_advice_calls.py::test_a_batch_that_no_name_and_no_shape_tells_is_named",
        ),
    ),
)

# After a failure

_FAILURES = (
    Advice(
        key="oom.plan",
        trigger="a step ran out of memory and nothing was compiled since",
        text="print(jm.plan({call}))",
        proof=Proof.COMPILED,
        tests=("tests/test_advice_calls.py::test_a_failed_step_is_planned_as_a_log_advises",),
    ),
    Advice(
        key="oom.look",
        trigger="the same",
        text="print(jm.step_memory(jm.jit_step({step}), state, batch).peak())",
        proof=Proof.COMPILED,
        tests=("tests/test_advice_calls.py::test_what_a_failed_step_holds_is_printed_as_a_log_advises",),
    ),
    Advice(
        key="oom.rows",
        trigger="half the batch was compiled and needs less",
        text="{name} = jax.tree.map(lambda x: x[:{rows}], {name})",
        proof=Proof.COMPILED,
        tests=("tests/test_advice_calls.py::test_half_the_batch_is_taken_as_printed",),
    ),
    Advice(
        key="memory.defragment",
        trigger="a pool had enough free but in pieces, or what is to be moved is no array that is there",
        text="state, report = jm.defragment(state)",
        proof=Proof.SIMULATED,
        tests=("tests/test_advice_calls.py::test_arrays_are_moved_together_as_printed",),
    ),
)

# What is typed

_TYPED = (
    Advice(
        key="option.typed",
        trigger="an option has another value than it takes, or is missing",
        text="--{option} {value}",
        proof=Proof.COMPILED,
        tests=("tests/test_advice_typed.py::test_an_option_is_typed_as_printed",),
    ),
    Advice(
        key="command.typed",
        trigger="a command shows more",
        text="jaxmem {typed}",
        proof=Proof.TRAINED,
        tests=(
            "tests/test_advice_typed.py::test_a_command_is_typed_as_printed",
            "tests/test_mirror.py::test_the_tab_names_the_command_that_reads_an_address",
        ),
    ),
    Advice(
        key="environment.apply",
        trigger="a preset's environment is not this process's",
        text="jm.apply_environment({preset})",
        proof=Proof.TRAINED,
        tests=("tests/test_advice_typed.py::test_an_environment_is_applied_as_printed",),
    ),
)

TABLE: tuple[Advice, ...] = (
    *_DATA,
    *_DONATION,
    *_SHARDING,
    *_TRAIN,
    *_RECOMPILATION,
    *_PLANS,
    *_GRADIENTS,
    *_ENVIRONMENT,
    *_SCRIPTS,
    *_MEMORY,
    *_CALLS,
    *_FAILURES,
    *_TYPED,
)

ADVICE = {row.key: row for row in TABLE}


def advise(key: str, **fields: Any) -> str:
    """The text of a row, filled in.

    Raises:
        KeyError: there is no such row.
        TypeError: other fields than the text has.
    """
    return ADVICE[key].filled(**fields)
