"""XLA's allocator as a model: what it gives out is what an independent allocator gives out, and its books are always true."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem_callbacks.simulator.allocators import BINS, MOST_SLACK_BYTES, Bfc, Blocks, Pages, bin_of
from tests.naive_allocator import NaiveAllocator

KIB, MIB, GIB = 2**10, 2**20, 2**30
# Small and large sizes, equal ones, and neighbours of the powers of two and of 256 at which rules change.
SIZES = st.one_of(
    st.integers(0, 2000),
    st.integers(0, 36).map(lambda power: 2**power),
    st.tuples(st.integers(8, 33), st.integers(-300, 300)).map(lambda pair: max(2 ** pair[0] + pair[1], 1)),
    st.sampled_from([4, 256, 257, 24 * KIB, MIB, 130 * MIB, 3 * GIB]),
)
# Negative: free the oldest, newest or some other one.
ACTIONS = st.lists(st.one_of(SIZES, st.integers(-40, -1)), min_size=1, max_size=120)
POOLS = st.tuples(
    st.integers(1, 2**33) | st.sampled_from([1000, MIB, 2 * MIB + 255, 12 * GIB]), st.booleans(), st.booleans()
)


def chunk_books(model):
    """Every invariant of the model's books; what is free, by size."""
    chunks = model.chunks()
    bins = model.bins()
    binned = {address: size for keys in bins for size, address in keys}
    free, in_use, covered = [], 0, 0
    for (address, size, used), after in zip(chunks, [*chunks[1:], None], strict=False):
        end = address + size
        assert size > 0
        assert size % 256 == 0
        assert after is None or end <= after[0], "chunks overlap"
        in_use += size if used else 0
        covered += size
        if not used:
            free.append(size)
            assert after is None or after[0] != end or after[2], "two free neighbours"
            in_gap = address not in binned
            assert not in_gap or after is None, "only the open end is in no bin"
    assert covered == model.pool_bytes, "chunks do not tile the regions"
    assert in_use == model.in_use_bytes
    assert set(binned.values()) <= set(free)
    for number, keys in enumerate(bins):
        assert keys == sorted(keys)
        for size, _ in keys:
            assert bin_of(size) == number
            assert size >= 256 << number
            assert number == BINS - 1 or size < 512 << number
    assert model.largest_free_bytes() == max(free, default=0)
    assert model.pool_bytes <= model.limit_bytes
    return sorted(free)


@pytest.mark.core
@settings(max_examples=120, deadline=None)
@given(POOLS, ACTIONS)
def test_it_gives_out_what_an_independent_allocator_gives_out(pool, actions):
    limit, preallocate, partitioned = pool
    model = Bfc(limit, preallocate=preallocate, partitioned=partitioned)
    naive = NaiveAllocator(limit, preallocate=preallocate, partitioned=partitioned)
    starts, held, peak, count, largest = {}, [], 0, 0, 0
    for action in actions:
        if action < 0:
            if held:
                address, place = held.pop(action % len(held))
                model.free(address)
                naive.free(*place)
        elif action == 0:
            assert model.allocate(0) == 0
            model.free(0)
        else:
            place, address = naive.allocate(action), model.allocate(action)
            assert (place is None) == (address is None)
            if place is not None and address is not None:
                region, offset = place
                starts.setdefault(region, address - offset)
                assert address == starts[region] + offset
                held.append((address, place))
                count += 1
                largest = max(largest, next(size for at, size, _ in model.chunks() if at == address))
                peak = max(peak, naive.in_use())
        assert chunk_books(model) == naive.free_sizes()
        said = model.statistics()
        assert (said["num_allocs"], said["bytes_in_use"], said["peak_bytes_in_use"]) == (count, naive.in_use(), peak)
        assert (said["pool_bytes"], said["largest_free_block_bytes"]) == (
            naive.pool(),
            max(naive.free_sizes(), default=0),
        )
        assert (said["bytes_limit"], said["largest_alloc_size"]) == (limit, largest)
    assert sorted(starts.values()) == list(starts.values()), "regions come with rising addresses"
    for address, _ in held:
        model.free(address)
    assert model.in_use_bytes == 0
    assert len(model.chunks()) == len(naive.regions), "what is all free is one chunk a region"


@given(st.integers(1, 2**40))
def test_bins_hold_what_lies_between_two_powers_of_two(size):
    number = bin_of(-(-size // 256) * 256)
    assert 0 <= number < 21
    assert 256 << number <= -(-size // 256) * 256
    assert number == 20 or -(-size // 256) * 256 < 512 << number


def test_a_block_is_split_where_it_is_twice_as_large_or_128_mib_too_large():
    def taken(hole, asked):
        model = Bfc(GIB * 8)
        below, above = model.allocate(hole), model.allocate(256)
        assert above is not None
        model.free(below)
        model.allocate(asked)
        return model.in_use_bytes - 256

    assert taken(1024, 512) == 512
    assert taken(1024, 768) == 1024
    assert taken(GIB, GIB - MOST_SLACK_BYTES) == GIB - MOST_SLACK_BYTES
    assert taken(GIB, GIB - MOST_SLACK_BYTES + 256) == GIB


def test_the_smallest_sufficient_block_is_taken_also_from_a_larger_bin():
    model = Bfc(GIB, preallocate=True)
    blocks = {size: model.allocate(size * KIB) for size in (900, 1, 600, 2, 700, 3)}
    for size in (900, 600, 700):
        model.free(blocks[size])
    assert model.allocate(550 * KIB) == blocks[600]
    assert model.allocate(550 * KIB) == blocks[700]
    assert model.allocate(512 * KIB) == blocks[900]


def test_a_growing_pool_doubles_its_regions_and_never_joins_them():
    model = Bfc(64 * MIB, preallocate=False)
    pools = []
    for _ in range(5):
        model.allocate(2 * MIB)
        pools.append(model.pool_bytes // MIB)
    assert pools == [2, 6, 6, 14, 14]
    model = Bfc(64 * MIB, preallocate=False)
    model.free(model.allocate(3 * MIB))
    model.free(model.allocate(20 * MIB))
    assert model.pool_bytes == (4 + 32) * MIB, "as many doublings as the request needs, and none after"
    assert model.allocate(33 * MIB) is None, "60 MiB are free, in regions of 4 and 32 and 28 not yet taken"
    assert model.free_bytes() == 64 * MIB
    assert model.largest_block_bytes() == 32 * MIB
    assert model.allocate(28 * MIB) is not None
    assert model.allocate(28 * MIB) is not None
    assert Bfc(64 * MIB).allocate(33 * MIB) is not None


def test_a_preallocated_pool_is_taken_whole_at_the_first_allocation():
    model = Bfc(12 * GIB)
    assert model.statistics()["pool_bytes"] == 0
    model.allocate(1)
    assert model.statistics()["pool_bytes"] == 12 * GIB
    assert model.in_use_bytes == 256


def test_what_the_driver_does_not_have_is_asked_for_in_smaller_regions():
    model = Bfc(16 * GIB, device_bytes=10 * GIB)
    assert model.allocate(GIB) is not None
    assert 9 * GIB < model.pool_bytes <= 10 * GIB
    assert model.allocate(10 * GIB) is None
    assert Bfc(16 * GIB, device_bytes=10 * GIB).allocate(11 * GIB) is None


def test_the_open_end_is_the_last_resort_of_a_partitioned_pool():
    """What a best fit takes from the open end, because that is the smaller block, jaxlib 0.11 takes from a hole."""

    def placed(*, partitioned):
        model = Bfc(16 * MIB, partitioned=partitioned)
        hole, fence = model.allocate(8 * MIB), model.allocate(256)
        assert fence is not None
        model.free(hole)
        return model.allocate(MIB), hole  # the hole has 256 bytes more than the open end

    address, hole = placed(partitioned=True)
    assert address == hole
    address, hole = placed(partitioned=False)
    assert address > hole


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.none() | st.sampled_from([0, GIB, 8 * GIB]))
def test_pages_are_bounded_by_what_is_asked_and_what_there_is(actions, kept):
    model = Pages(8 * GIB, kept_bytes=kept)
    held, asked = {}, 0
    for action in actions:
        if action < 0 and held:
            number = list(held)[action % len(held)]
            model.free(number)
            asked -= held.pop(number)
        elif action > 0:
            number = model.allocate(action)
            if number is None:
                assert model.in_use_bytes + action > 8 * GIB - 2 * MIB
            else:
                held[number] = action
                asked += action
        assert asked <= model.in_use_bytes <= min(8 * GIB, asked + 2 * MIB * (len(held) + 1))
        assert model.largest_block_bytes() == model.free_bytes() == 8 * GIB - model.in_use_bytes
        assert model.largest_free_bytes() is None
        if kept is None:
            assert model.pool_bytes is None
        else:
            assert model.in_use_bytes <= model.pool_bytes <= max(8 * GIB, kept)
    for number in held:
        model.free(number)
    assert model.in_use_bytes == 0
    assert model.allocate(0) == 0


def test_small_blocks_share_a_page_and_large_ones_have_their_own():
    model = Pages(8 * MIB, kept_bytes=4 * MIB)
    small = [model.allocate(4) for _ in range(1000)]
    assert model.in_use_bytes == 2 * MIB
    large = model.allocate(3 * MIB)
    assert model.in_use_bytes == 6 * MIB
    for each in small:
        model.free(each)
    model.free(large)
    assert (model.in_use_bytes, model.pool_bytes) == (0, 4 * MIB)


@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 300)), min_size=1, max_size=30))
def test_what_is_taken_at_a_place_splits_the_free_block_there_and_is_merged_again(places):
    blocks = Blocks()
    blocks.add_region(4096, MIB)
    taken = []
    for offset, halves in places:
        address, size = 4096 + offset * 128, halves * 128
        if all(address + size <= other or other + length <= address for other, length in taken):
            hole, have = blocks.take_at(address, size)
            assert hole <= address < address + size <= hole + have
            taken.append((address, size))
    free, low = [], 4096
    for address, size in [*sorted(taken), (4096 + MIB, 0)]:
        free += [(low, address - low)] if address > low else []
        low = address + size
    assert sorted((address, blocks.sizes[address]) for address in blocks.free) == free
    assert blocks.largest_free_bytes() == max(size for _, size in free)
    for address, _ in taken:
        merged, size = blocks.give_back(address)
    assert (merged, size) == (4096, MIB)
    assert sorted(size for keys in blocks.bins() for size, _ in keys) == [MIB]
