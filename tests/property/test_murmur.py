"""Hashes of many keys at once are those of each key: a key must never go to another partition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")
np = pytest.importorskip("numpy")
pytest.importorskip("pyspark")

from holdfast.broker.messages import partitions_for  # noqa: E402
from holdfast.codec.arrow import Bytes, murmur3_of  # noqa: E402
from holdfast.spark.incoming import _by_key  # noqa: E402

keys_of_any_kind = st.lists(st.binary(max_size=40), max_size=50)


@given(keys_of_any_kind, st.integers(0, 3))
def test_hashes_of_many_keys_are_those_of_each(keys: list[bytes], skipped: int) -> None:
    laid_out = Bytes.of(pa.array(keys, pa.binary())[skipped:])
    found = murmur3_of(laid_out.ends, np.frombuffer(laid_out.data, np.uint8))
    assert found is not None
    assert found.tolist() == partitions_for(keys[skipped:], 2**32)


@pytest.mark.parametrize("keys", [[bytes(n) for n in range(80)], [b"k" * 300, b"short"]])
def test_keys_of_too_many_lengths_are_left_to_the_plain_way(keys: list[bytes]) -> None:
    laid_out = Bytes.of(pa.array(keys, pa.binary()))
    assert murmur3_of(laid_out.ends, np.frombuffer(laid_out.data, np.uint8)) is None
    assert _by_key(pa.array(keys, pa.binary()), len(keys), 5).tolist() == partitions_for(keys, 5)


@given(st.lists(st.none() | st.text(max_size=12), min_size=1, max_size=50), st.integers(1, 9))
def test_rows_go_where_the_library_puts_their_keys(keys: list[str | None], partitions: int) -> None:
    found = _by_key(pa.array(keys, pa.string()), len(keys), partitions).tolist()
    assert found == [-1 if key is None else partitions_for([key.encode()], partitions)[0] for key in keys]
