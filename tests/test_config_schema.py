"""The schema says every field of the records, the editors' JSON Schema is the same one, and each shipped part obeys both."""

import dataclasses
import json
import re

import jsonschema
import pytest
import yaml

from jaxmem_callbacks.config import schema
from jaxmem_callbacks.config.documents import shipped_folder
from jaxmem_callbacks.config.presets import list_presets, load_preset, parse_preset
from jaxmem_callbacks.records.errors import PresetError
from jaxmem_callbacks.records.policies import MAXTEXT_REMAT, REMAT_SYNONYMS

FIELDS = [(section, field) for section, record in schema.SECTIONS.items() for field in dataclasses.fields(record)]


@pytest.fixture(scope="module")
def validator():
    shipped = json.loads((shipped_folder() / "preset.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(shipped)
    return jsonschema.Draft202012Validator(shipped)


@pytest.mark.parametrize(("section", "field"), FIELDS, ids=lambda value: getattr(value, "name", value))
def test_every_field_of_the_records_is_in_the_schema(section, field, validator):
    model = schema.PresetFile.model_fields[section].annotation
    assert model.model_fields[field.name].default == field.default
    said = validator.schema["$defs"][section.capitalize()]["properties"]
    assert said[field.name] == said[schema.short_key(field.name)]
    assert said[field.name]["description"] == schema.attribute_docs(schema.SECTIONS[section])[field.name]
    assert schema.expected(f"{section}.{field.name}")


def test_the_tables_name_fields_that_exist():
    known = {f"{section}.{field.name}" for section, field in FIELDS}
    assert set(schema.RANGES) <= known
    assert {schema.full_key("monitor", "limit"), schema.full_key("monitor", "nope")} == {"limit_bytes", "nope"}


def test_the_shipped_json_schema_is_up_to_date(tmp_path, capsys):
    shipped = (shipped_folder() / "preset.schema.json").read_text()
    assert shipped == schema.schema_text(), "stale: python -m jaxmem_callbacks.config.schema"
    assert schema.main([str(tmp_path / "new.json")]) == 0
    assert (tmp_path / "new.json").read_text() == shipped
    assert capsys.readouterr().out == f"wrote {tmp_path / 'new.json'}\n"


@pytest.mark.parametrize("name", list_presets())
def test_each_shipped_part_is_one_idea_with_a_description(name, validator):
    text = (shipped_folder() / f"{name}.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=preset.schema.json\n")
    validator.validate(yaml.safe_load(text))
    preset = load_preset(name)
    assert re.search(r"\. Use it .*\. .*[Cc]osts .*\.$", preset.description), (
        "what it does, when to use it, what it costs"
    )
    assert 1 <= len(preset.said) <= 3


# What an editor underlines and what the loader refuses must be the same.
@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("policy: {remat: dots, segments: 3, donate: auto}", True),
        ("policy: {remat: full, donate: [state], save: [a]}", True),
        ("monitor: {limit: 700MiB, every_steps: 2, tensorboard: false}", True),
        ("monitor: {limit_bytes: 4096}", True),
        ("monitor: {limit: '12 parsec'}", False),
        ("monitor: {limit: '3 iB'}", False),
        ("monitor: {limit: 2.5 tb}", True),
        ("monitor: {limit: 0}", False),
        ("monitor: {every_steps: 0}", False),
        ("monitor: {every_steps: 2.0}", True),
        ("monitor: {every_steps: 2.5}", False),
        ("monitor: {near_oom_headroom: 1}", False),
        ("monitor: {fragmentation_share: 0}", False),
        ("monitor: {on_error: explode}", False),
        ("policy: {remat: ful}", False),
        ("policy: {donate: state}", False),
        ("policy: {segments: 0}", False),
        ("policy: {sharding: fsdp}", True),
        ("policy: {sharding: {embed: fsdp, mlp: [data, tensor], norm: null}}", True),
        ("policy: {sharding: [[embed, fsdp], [embed, tensor]]}", True),
        ("policy: {sharding: fdsp}", False),
        ("policy: {sharding: {embed: 3}}", False),
        ("policy: {sharding: {}}", False),
        ("policy: {sharding: [[embed, fsdp, tensor]]}", False),
        ("environment: {preallocate: false, fraction: 0.9, allocator: cuda_async}", True),
        ("environment: {platform: tpu}", True),
        ("environment: {collective_pool: 512MiB}", True),
        ("environment: {collective_pool: 1048576}", True),
        ("environment: {collective_pool: 1000000}", False),
        ("environment: {fraction: 0}", False),
        ("environment: {fraction: 1.5}", False),
        ("environment: {preallocate: 'no'}", False),
        ("environment: {allocator: cuda_malloc_async}", False),
        ("environment: {platform: gpu}", False),
        ("polcy: {}", False),
        ("policy: {rematt: full}", False),
    ],
)
def test_editors_and_the_loader_agree(text, is_valid, validator):
    assert validator.is_valid(yaml.safe_load(text)) == is_valid
    if is_valid:
        parse_preset(text)
    else:
        with pytest.raises(PresetError, match=r"Expected|Allowed"):
            parse_preset(text)


def test_editors_offer_every_remat_word(validator):
    words = validator.schema["$defs"]["Policy"]["properties"]["remat"]["enum"]
    known = {word for name, synonyms in REMAT_SYNONYMS.items() for word in (name, *synonyms)}
    assert set(words) == known.union(MAXTEXT_REMAT)
