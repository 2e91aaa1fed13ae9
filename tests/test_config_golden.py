"""Resolved text of each shipped preset and the texts of typical mistakes, compared with files in tests/golden.

Rewrite them on purpose with ``JAXMEM_UPDATE_GOLDEN=1 pytest tests/test_config_golden.py``, and read the difference.
"""

import os
from pathlib import Path

import pytest

from jaxmem_callbacks.config.presets import list_presets, load_preset, parse_preset, preset_to_yaml
from jaxmem_callbacks.records.errors import PresetError

GOLDEN = Path(__file__).parent / "golden"
COMPOSED = ("donate+full_remat", "monitor_only+dots_remat+tight_headroom", "fsdp+gpu_rocm+gpu_growth")
MISTAKES = {
    "unknown key": "policy:\n  rematt: full\n",
    "wrong section": "policy:\n  every_steps: 10\n",
    "wrong type": "policy:\n  remat: full\n  segments: four\n",
    "unknown remat policy": "policy:\n  remat: dots_savable\n",
    "one name instead of a list": "policy:\n  remat: full\n  save: context\n",
    "YAML 1.1 boolean": "monitor:\n  tensorboard: yes\n",
    "not a size": "monitor:\n  limit: 12 parsec\n",
    "misspelt own checkpoints": "policy:\n  own_checkpoints: replaced\n",
    "contradiction": "policy:\n  remat: none\n  segments: 4\n",
    "contradiction of platform and setting": "environment:\n  platform: tpu\n  preallocate: false\n",
    "misspelt allocator": "environment:\n  allocator: cuda_asinc\n",
    "half a MiB": "environment:\n  collective_pool: 512KiB\n",
    "duplicate key": "policy:\n  remat: full\n  remat: none\n",
    "tab": "policy:\n\tremat: full\n",
    "object tag": "policy: !!python/object/apply:os.system [id]\n",
    "alias": "policy: &p {remat: full}\nmonitor: *p\n",
    "empty": "",
    "several": "descripton: x\npolicy:\n  rematt: full\nmonitor:\n  on_error: rise\n",
}


def compare(name, text):
    path = GOLDEN / name
    if os.environ.get("JAXMEM_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; see the top of this file"


@pytest.mark.parametrize("name", [*list_presets(), *COMPOSED])
def test_resolved_presets(name):
    text = preset_to_yaml(load_preset(*name.split("+")), defaults="show")
    compare(f"presets/{name}.yaml", text)
    assert parse_preset(text).policy == load_preset(*name.split("+")).policy


def test_no_golden_preset_is_left_over():
    assert {path.stem for path in (GOLDEN / "presets").glob("*.yaml")} == {*list_presets(), *COMPOSED}


def test_texts_of_typical_mistakes():
    told = []
    for title, text in MISTAKES.items():
        with pytest.raises(PresetError) as caught:
            parse_preset(text, "my.yaml")
        told.append(f"== {title}\n{text}--\n{caught.value}\n")
    compare("preset_errors.txt", "\n".join(told))
