"""What equations cost in time, counted in operations: what is dear to compute again is chosen by it.

Enters: an equation. Leaves: what its collectives take, as so many operations of matrix products as a device does in that time.
Whoever is asked to keep something does not know for which device: most vendors' lie within a factor of two of this.
"""

from __future__ import annotations

from typing import Any

from jaxmem_callbacks._compat.jaxprs import subjaxprs
from jaxmem_callbacks.transforms.flops import Amount, equation_cost
from jaxmem_callbacks.transforms.residuals import nbytes

# Operations of bfloat16 products in the time in which a byte goes through a device's links to others: the middle of what data
# sheets say of A100 (1040), v4 (1833), v5e (1970), H100 (2198), B200 (2500) and v6e (4098).
LINK_BYTE = 2000
_COLLECTIVES = {
    *("all_gather", "all_gather_invariant", "all_to_all", "pmax", "pmin", "ppermute"),
    *("psum", "psum2", "psum_invariant", "ragged_all_to_all", "reduce_scatter"),
}


def collective_work(eqn: Any) -> float:
    """Operations in whose time the collectives of one equation, its bodies included, move what they move."""
    return equation_cost(eqn, _leaf, Amount(0.0), Amount(0.0)).weight if subjaxprs(eqn) else _leaf(eqn).weight


def _leaf(eqn: Any) -> Amount:
    if eqn.primitive.name not in _COLLECTIVES:
        return Amount(0.0)
    return Amount(float(LINK_BYTE * max(sum(map(nbytes, atoms)) for atoms in (eqn.invars, eqn.outvars))))
