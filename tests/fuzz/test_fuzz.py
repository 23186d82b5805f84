"""Fuzzing of everything that reads text from outside: hypothesis here, a million mutated seeds each in the slow suite.

FUZZ_CASES sets the number of cases of the slow suite.
"""

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from targets import SEEDS, TARGETS, mutate

CASES = int(os.environ.get("FUZZ_CASES", 1_000_000))


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes(name):
    pieces = st.sampled_from(SEEDS[name])

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        st.one_of(
            st.binary(max_size=200),
            st.text(max_size=80).map(str.encode),
            st.lists(st.one_of(pieces, st.binary(max_size=8)), max_size=6).map(b"".join),
        )
    )
    def check(data):
        TARGETS[name](data)

    check()


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_seeds(name):
    generator = random.Random(0)
    for _ in range(500):
        TARGETS[name](mutate(name, generator))


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_mutated_seeds(name, record_property):
    generator = random.Random(1)
    for case in range(CASES):
        data = mutate(name, generator)
        try:
            TARGETS[name](data)
        except Exception as error:
            raise AssertionError(f"case {case} of {name}: {data!r}") from error
    record_property("cases", CASES)
