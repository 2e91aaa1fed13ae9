"""Records of out-of-memory reports for the tests of how they look: every text of one of them is an attack."""

from __future__ import annotations

from jaxmem_callbacks.records.oom import (
    FailedProgram,
    Holder,
    Hole,
    MemoryLimit,
    ModuleHolder,
    OomFacts,
    OomReport,
    Remedy,
)
from jaxmem_callbacks.records.peaks import Buffer, peak_of
from jaxmem_callbacks.records.programs import ProgramMemory
from jaxmem_callbacks.records.runs import MemoryEvent, Reading, Unavailable
from tests.sample_runs import HOSTILE

GIB = 2**30


def hostile_report() -> OomReport:
    """A report of everything, each text hostile, one of them on two lines."""
    memory = ProgramMemory(
        name=HOSTILE,
        platform="gpu",
        target="attached",
        argument_bytes=GIB,
        output_bytes=1,
        alias_bytes=0,
        temp_bytes=GIB,
    )
    buffer = Buffer(bytes=GIB, shape=HOSTILE, kind="temporary", operation=HOSTILE, source=HOSTILE, group="temporaries")
    program = FailedProgram(
        name=HOSTILE,
        known_by=HOSTILE,
        memory=memory,
        peak=peak_of([buffer]),
        gone=(HOSTILE,),
        gone_bytes=1,
        fate=HOSTILE,
    )
    holder = Holder(
        name=HOSTILE,
        known_by=HOSTILE,
        module=HOSTILE,
        kind=HOSTILE,
        type_text=HOSTILE,
        count=1,
        bytes=GIB,
        devices=(HOSTILE,),
        site=HOSTILE,
    )
    remedy = Remedy(
        what=HOSTILE, lines=(HOSTILE,), compiled=True, basis=HOSTILE, saves_bytes=1, needs_bytes=1, costs=HOSTILE
    )
    return OomReport(
        sentence=HOSTILE,
        cause="capacity",
        evidence=HOSTILE,
        time_s=0.0,
        process=HOSTILE,
        error_type=HOSTILE,
        error_text=f"{HOSTILE}\n{HOSTILE}",
        where=(HOSTILE,),
        facts=OomFacts(allocator=HOSTILE, program=HOSTILE),
        limits=(MemoryLimit(name=HOSTILE, limit_bytes=2, used_bytes=1, source=HOSTILE),),
        program=program,
        holders=(holder,),
        modules=(ModuleHolder(name=HOSTILE, modules=2, count=2, bytes=GIB, kinds={HOSTILE: GIB}),),
        live_bytes=GIB,
        live_count=1,
        events=(MemoryEvent(kind="near_oom", step=1, time_s=0.0, device=HOSTILE, message=HOSTILE, action=HOSTILE),),
        readings=(Reading(source="host", device=HOSTILE, step=1, time_s=0.0, resident_bytes=1),),
        no_allocator=(Unavailable(figure="allocator", device=HOSTILE, reason=HOSTILE),),
        holes=(Hole(device=HOSTILE, bytes=GIB, below=HOSTILE, above=HOSTILE),),
        versions={HOSTILE: HOSTILE},
        devices={HOSTILE: HOSTILE},
        environment={HOSTILE: HOSTILE},
        remedies=(remedy,),
        planning=HOSTILE,
        failures=(HOSTILE,),
    )
