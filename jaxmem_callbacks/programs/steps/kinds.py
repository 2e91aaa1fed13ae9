"""The names of `transforms.kinds` under their former place: what an argument holds."""

from jaxmem_callbacks.transforms.kinds import OPTIMIZER, OTHER, PARAMETERS, STATE, is_batch_name, kind_of_argument

__all__ = ["OPTIMIZER", "OTHER", "PARAMETERS", "STATE", "is_batch_name", "kind_of_argument"]
