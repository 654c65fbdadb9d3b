"""Which member gets which partition."""

from __future__ import annotations

from holdfast.membership import Assignor, assign

SAME = {"ann": ["orders"], "bob": ["orders"], "eve": ["orders"]}


def shares(how: Assignor, wants, counts, current=None) -> dict[str, str]:
    """Partitions by member, as short text: "o0 o1 p0"."""
    found = assign(how, wants, counts, current)
    return {member: " ".join(f"{topic[0]}{partition}" for topic, partition in found[member]) for member in found}


def test_range_gives_each_member_neighbours_of_each_topic():
    wants = {"ann": ["orders", "prices"], "bob": ["orders", "prices"]}
    assert shares("range", wants, {"orders": 3, "prices": 3}) == {"ann": "o0 o1 p0 p1", "bob": "o2 p2"}


def test_range_passes_over_members_that_do_not_want_a_topic():
    wants = {"ann": ["orders"], "bob": ["orders", "prices"]}
    assert shares("range", wants, {"orders": 3, "prices": 2}) == {"ann": "o0 o1", "bob": "o2 p0 p1"}


def test_round_robin_deals_all_topics_in_one_round():
    wants = {"ann": ["orders", "prices"], "bob": ["orders", "prices"]}
    assert shares("round_robin", wants, {"orders": 3, "prices": 3}) == {"ann": "o0 o2 p1", "bob": "o1 p0 p2"}


def test_in_a_round_robin_whoever_was_passed_over_stays_next():
    wants = {"ann": ["orders"], "bob": ["prices"], "eve": ["orders", "prices"]}
    assert shares("round_robin", wants, {"orders": 3, "prices": 2}) == {"ann": "o0 o2", "bob": "p0", "eve": "o1 p1"}


def test_more_members_than_partitions_leave_some_with_nothing():
    for how in ("range", "round_robin", "sticky"):
        assert shares(how, SAME, {"orders": 2}) == {"ann": "o0", "bob": "o1", "eve": ""}


def test_nobody_and_nothing_are_fine():
    for how in ("range", "round_robin", "sticky"):
        assert assign(how, {}, {"orders": 2}) == {}
        assert assign(how, {"ann": ["orders"]}, {}) == {"ann": ()}
        assert assign(how, {"ann": []}, {"orders": 3}) == {"ann": ()}


def test_sticky_gives_a_newcomer_its_share_and_leaves_the_rest_where_it_is():
    current = {"ann": [("orders", 0), ("orders", 2), ("orders", 4)], "bob": [("orders", i) for i in (1, 3, 5)]}
    assert shares("sticky", SAME, {"orders": 6}, current) == {"ann": "o0 o2", "bob": "o1 o3", "eve": "o4 o5"}


def test_sticky_moves_nothing_when_the_balance_is_as_good_as_it_gets():
    current = {"ann": [("orders", 4)], "bob": [("orders", 0), ("orders", 2)], "eve": [("orders", 1), ("orders", 3)]}
    assert shares("sticky", SAME, {"orders": 5}, current) == {"ann": "o4", "bob": "o0 o2", "eve": "o1 o3"}


def test_sticky_spreads_what_a_leaver_had():
    current = {"ann": [("orders", 0)], "bob": [("orders", 1)], "gone": [("orders", 2), ("orders", 3)]}
    wants = {"ann": ["orders"], "bob": ["orders"]}
    assert shares("sticky", wants, {"orders": 4}, current) == {"ann": "o0 o2", "bob": "o1 o3"}


def test_sticky_moves_along_a_chain_where_no_single_move_helps():
    wants = {"ann": ["orders"], "bob": ["orders", "prices"], "eve": ["prices"]}
    current = {"ann": [("orders", i) for i in range(4)], "bob": [("prices", 0), ("prices", 1)]}
    found = assign("sticky", wants, {"orders": 4, "prices": 2}, current)
    assert {member: len(found[member]) for member in found} == {"ann": 2, "bob": 2, "eve": 2}
    assert found["eve"] == (("prices", 0), ("prices", 1))


def test_sticky_believes_nobody_who_claims_what_is_not_there_or_anothers():
    current = {"ann": [("orders", 0), ("orders", 9), ("prices", 0)], "bob": [("orders", 0)]}
    wants = {"ann": ["orders"], "bob": ["orders"]}
    assert shares("sticky", wants, {"orders": 2, "prices": 1}, current) == {"ann": "o0", "bob": "o1"}


def test_a_member_and_a_topic_may_have_the_same_name():
    wants = {"orders": ["orders", "prices"], "prices": ["prices"]}
    found = assign("sticky", wants, {"orders": 2, "prices": 2}, {"prices": []})
    assert found == {"orders": (("orders", 0), ("orders", 1)), "prices": (("prices", 0), ("prices", 1))}


def test_a_large_group_with_different_wishes_is_shared_quickly():
    topics = [f"t{i:02}" for i in range(20)]
    wants = {f"m{i:02}": [topics[(i + j) % 20] for j in range(8)] for i in range(40)}
    counts = dict.fromkeys(topics, 25)
    before = assign("sticky", wants, counts)
    assert sum(map(len, before.values())) == 500
    wants["m99"] = topics[:4]
    after = assign("sticky", wants, counts, before)
    assert max(map(len, after.values())) - min(map(len, after.values())) <= 1
    assert sum(len(set(before[m]) - set(after[m])) for m in before) < 2 * len(after["m99"])  # some by a chain of two
