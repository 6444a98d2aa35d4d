"""What the acceptance report promises: integer counts, each rate by its printed definition."""

import json

from paceline.decode import DEFINITIONS, AcceptanceReport


def scripted(counts: list[int], k: int = 4) -> AcceptanceReport:
    report = AcceptanceReport()
    for accepted in counts:
        report.add(accepted, offered=k, nodes=k, emitted=accepted + 1)
    return report


def test_the_bonus_token_counts_in_the_length_and_in_no_rate() -> None:
    report = scripted([0, 4, 1, 0, 3])
    assert (report.num_drafts, report.num_draft_tokens, report.num_accepted_tokens) == (5, 20, 8)
    assert report.num_accepted_tokens_per_pos == [3, 2, 2, 1]
    assert report.draft_acceptance_rate == 8 / 20
    assert report.mean_acceptance_length == 13 / 5
    assert report.per_position_acceptance_rate == [3 / 5, 2 / 5, 2 / 5, 1 / 5]
    # of the 5, 3, 2 and 2 rounds that got so far
    assert report.conditional_acceptance_rate == [3 / 5, 2 / 3, 2 / 2, 1 / 2]


def test_nothing_proposed_is_no_rate_and_no_crash() -> None:
    for report in (AcceptanceReport(), sum([], AcceptanceReport())):
        assert report.mean_acceptance_length is None and report.draft_acceptance_rate is None
        assert report.per_position_acceptance_rate == report.conditional_acceptance_rate == []
    plain = AcceptanceReport()
    plain.add(0, 0, 0, 1)
    assert plain.mean_acceptance_length == 1.0 and plain.draft_acceptance_rate is None


def test_a_depth_that_was_not_offered_is_no_miss() -> None:
    report = AcceptanceReport()
    report.add(accepted=1, offered=1, nodes=1, emitted=2)  # the drafter fell silent after one
    report.add(accepted=1, offered=3, nodes=3, emitted=2)
    assert report.per_position_acceptance_rate == [1.0, 0.0, 0.0]
    assert report.conditional_acceptance_rate == [1.0, 0.0, None]


def test_a_tree_proposes_all_its_nodes() -> None:
    report = AcceptanceReport()
    report.add(accepted=2, offered=3, nodes=15, emitted=3)
    assert report.draft_acceptance_rate == 2 / 15 and report.mean_acceptance_length == 3.0


def test_a_depth_is_offered_only_under_what_was_accepted() -> None:
    report = AcceptanceReport()
    report.add(
        accepted=1, offered=1, nodes=6, emitted=2, depth=3
    )  # the accepted node was a leaf, another branch deeper
    assert report.per_position_acceptance_rate == [1.0, 0.0, 0.0]
    assert report.conditional_acceptance_rate == [1.0, None, None]


def test_a_sum_of_reports_is_the_report_of_all_rounds() -> None:
    parts = [[0, 4], [], [1], [0, 3]]
    whole = sum((scripted(part, k) for part, k in zip(parts, (4, 1, 2, 4), strict=True)), AcceptanceReport())
    assert whole.accepted == scripted([0, 4, 1, 0, 3]).accepted
    assert whole.nodes == 4 * 4 + 2 and whole.rounds == 5 and whole.emitted == 13
    one, other = scripted([1]), scripted([2], k=6)
    before = one.as_dict(), other.as_dict()
    assert (one + other).as_dict() == (other + one).as_dict()
    assert (one.as_dict(), other.as_dict()) == before, "a sum writes none of its parts"


def test_every_rate_is_defined_in_print_and_the_report_is_json() -> None:
    entry = scripted([0, 4]).as_dict()
    assert json.loads(json.dumps(entry)) == entry
    assert {name for name in entry if not name.startswith("num_")} == set(DEFINITIONS)
