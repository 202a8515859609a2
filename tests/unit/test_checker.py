"""The checker must find what is forged into the evidence, and nothing in evidence that is sound."""

from __future__ import annotations

from msgspec.structs import replace

from shoal.demo.site import Hit
from shoal.model import Counts
from tests.rig.checker import Evidence, Kill, longest_silence, violations

PAGES = [f"http://127.0.0.1:80/page/{number}" for number in range(5)]
BROKEN = PAGES[4]


def hit(at: float, page: int, *, took: float = 0.1, status: int = 200, agent: str = "a") -> Hit:
    return Hit(at, at + took, "127.0.0.1", "127.0.0.1:80", "GET", f"/page/{page}", status, 1, agent=agent)


def sound() -> Evidence:
    """Five pages a second apart; the fourth visit is cut by a kill and repeated, the last page is dead."""
    return Evidence(
        wanted={url: "dead" if url == BROKEN else "done" for url in PAGES},
        stored=PAGES[:4],
        dead=[(BROKEN, "http_500")],
        counts=Counts(added=5, done=4, dead=1, items=4),
        hits=[
            *(hit(float(number), number) for number in range(3)),
            hit(3.0, 3, status=0),
            hit(6.0, 3, agent="b"),
            hit(7.0, 4, status=500, agent="b"),
        ],
        gap=1.0,
        width=1,
        lease=2.0,
        kills=[Kill(3.1, "a")],
    )


def told(evidence: Evidence) -> str:
    return "\n".join(violations(evidence))


def test_sound_evidence_is_sound() -> None:
    assert violations(sound()) == []


def test_a_lost_url_is_named() -> None:
    evidence = replace(sound(), stored=PAGES[:3], counts=Counts(added=5, done=3, dead=1, items=3))
    assert f"lost: {PAGES[3]} is neither stored nor dead" in told(evidence)


def test_an_item_stored_twice_is_named() -> None:
    evidence = replace(sound(), stored=[*PAGES[:4], PAGES[0]])
    assert f"twice: {PAGES[0]} is stored 2 times" in told(evidence)


def test_stored_and_dead_is_one_end_too_many() -> None:
    evidence = replace(sound(), dead=[(BROKEN, "http_500"), (PAGES[0], "http_500")])
    assert f"twice: {PAGES[0]} is stored and also dead" in told(evidence)


def test_dead_twice_is_named() -> None:
    assert f"{BROKEN} is dead 2 times" in told(replace(sound(), dead=[(BROKEN, "http_500")] * 2))


def test_the_wrong_end_is_named() -> None:
    dead = [(BROKEN, "http_500"), (PAGES[3], "deadline")]
    evidence = replace(sound(), stored=PAGES[:3], dead=dead)
    assert f"wrong end: {PAGES[3]} is dead as deadline and should be done" in told(evidence)
    evidence = replace(sound(), stored=PAGES, dead=[])
    assert f"wrong end: {BROKEN} is stored and should be dead" in told(evidence)


def test_strangers_are_named() -> None:
    other = "http://127.0.0.1:80/other"
    assert f"stranger: {other} is stored" in told(replace(sound(), stored=[*PAGES[:4], other]))
    assert f"stranger: {other} is dead" in told(
        replace(sound(), dead=[(BROKEN, "http_500"), (other, "http_500")])
    )


def test_crashed_without_three_deaths_is_wrong() -> None:
    evidence = replace(sound(), stored=PAGES[:3], dead=[(BROKEN, "http_500"), (PAGES[3], "worker_crashed")])
    assert f"{PAGES[3]} is dead as worker_crashed, and only 1 died" in told(evidence)
    assert "only 2 died" in told(replace(evidence, outages=1))
    deaths = [Kill(float(number), f"w{number}") for number in range(3)]
    assert "2 are dead as worker_crashed, 1% may be" in told(
        replace(
            evidence, kills=deaths, stored=PAGES[:2], dead=[(url, "worker_crashed") for url in PAGES[2:4]]
        )
    )


def test_one_unlucky_url_in_a_hundred_is_no_violation() -> None:
    urls = [f"http://127.0.0.1:80/{number}" for number in range(100)]
    evidence = Evidence(
        wanted=dict.fromkeys(urls, "done"),
        stored=urls[1:],
        dead=[(urls[0], "worker_crashed")],
        counts=Counts(added=100, done=99, dead=1, items=99),
        hits=[],
        kills=[Kill(float(number), f"w{number}") for number in range(3)],
    )
    assert violations(evidence) == []


def test_a_visit_before_its_turn_is_named() -> None:
    hits = [*sound().hits, hit(7.5, 4, status=500, agent="b")]
    assert "too fast: http://127.0.0.1:80/page/4 on 127.0.0.1 came 0.500 s after" in told(
        replace(sound(), hits=hits)
    )
    # As much as the machine stalled, and not more.
    assert "too fast" not in told(replace(sound(), hits=hits, stall=lambda begin, end: 0.5))
    assert "too fast" in told(replace(sound(), hits=hits, stall=lambda begin, end: 0.35))
    # Another host has a pace of its own.
    other = replace(hits[-1], address="127.0.0.2")
    assert "too fast" not in told(replace(sound(), hits=[*sound().hits, other]))


def test_too_many_at_a_time_are_named() -> None:
    hits = [*sound().hits[:5], hit(7.0, 4, status=500, took=2.0), hit(8.0, 4, status=500)]
    assert "too wide: 2 visits at a time on 127.0.0.1" in told(replace(sound(), hits=hits))
    assert "too wide" not in told(replace(sound(), hits=hits, width=2))


def test_counters_are_recounted() -> None:
    for name, wrong in {"added": 6, "done": 5, "dead": 2, "items": 5}.items():
        counts = replace(sound().counts, **{name: wrong})
        assert f"miscounted: {name} is {wrong}" in told(replace(sound(), counts=counts))
    assert "miscounted: live is 1" in told(replace(sound(), counts=replace(sound().counts, added=6)))
    assert "inconsistent: a lane is off" in told(replace(sound(), recount=["a lane is off"]))


def test_a_long_silence_is_named() -> None:
    hits = [*sound().hits[:5], hit(18.1, 4, status=500)]
    assert "silence: nobody came for 12.1 s, 12 s are allowed" in told(replace(sound(), hits=hits))
    assert longest_silence(hits) == 18.1 - 6.0


def test_a_cut_visit_that_comes_back_late_is_named() -> None:
    hits = [
        *sound().hits[:4],
        *(hit(4.0 + number, 4, status=500, agent="b") for number in range(12)),
        hit(16.0, 3, agent="b"),
    ]
    assert f"late: {PAGES[3]} was cut by a kill and visited again 12.9 s later" in told(
        replace(sound(), hits=hits)
    )


def test_many_of_a_kind_become_a_number() -> None:
    urls = [f"http://127.0.0.1:80/{number}" for number in range(12)]
    sentences = violations(Evidence(dict.fromkeys(urls, "done"), [], [], Counts(added=12), []))
    lost = [sentence for sentence in sentences if "lost" in sentence]
    assert len(lost) == 6
    assert lost[-1] == "…and 7 more of the kind `lost`"
