from __future__ import annotations

from draftsmith.target import endpoints
from draftsmith.target.endpoints import FAULTS_IN_A_ROW, LOOK_LIMIT, TRIAL_SECONDS, Endpoint, Endpoints


def left_out(now: float = 100.0) -> Endpoint:
    endpoint = Endpoint("http://one")
    assert endpoint.lost("refused", now, now)
    return endpoint


def test_a_server_that_comes_back_gets_one_request_on_trial_before_all_others() -> None:
    endpoint = left_out()
    assert not endpoint.free(200.0)
    endpoint.back(200.0)
    assert endpoint.free(200.0)
    endpoint.begin()
    assert not endpoint.free(200.1)
    assert endpoint.answered(200.0) == 100.0  # since when there was no reply
    assert endpoint.free(200.2)
    assert endpoint.answered(200.2) is None


def test_a_trial_that_meets_no_fault_for_long_is_a_good_sign_because_replies_are_silent() -> None:
    endpoint = left_out()
    endpoint.back(200.0)
    endpoint.begin()
    assert not endpoint.free(200.0 + TRIAL_SECONDS - 0.1)
    assert endpoint.free(200.0 + TRIAL_SECONDS)


def test_one_fault_ends_a_trial_and_the_looks_become_rarer() -> None:
    endpoint, pauses, now = left_out(), [], 100.0
    for _ in range(8):
        now = endpoint.look_at
        endpoint.back(now)
        endpoint.begin()
        assert not endpoint.faulted("HTTP 500", now, now)  # no news: it was left out before
        pauses.append(endpoint.pause)
    assert pauses == sorted(pauses)
    assert pauses[-1] == LOOK_LIMIT
    endpoint.back(now)
    endpoint.answered(now)
    assert endpoint.pause == 0


def test_faults_and_replies_from_before_say_nothing_of_a_server_that_came_back() -> None:
    endpoint = left_out()
    assert endpoint.answered(99.0) is None  # what a server that shuts down still ends
    assert endpoint.reason
    endpoint.back(200.0)
    assert not endpoint.faulted("reset", 99.0, 201.0)
    assert not endpoint.lost("refused", 99.0, 201.0)
    assert endpoint.reason == ""


def test_faults_between_replies_leave_no_server_out() -> None:
    endpoint = Endpoint("http://one")
    for n in range(50):
        assert not endpoint.faulted("HTTP 500", n, n)
        if n % (FAULTS_IN_A_ROW - 1) == 0:
            endpoint.answered(n)
    assert endpoint.reason == ""


def test_the_more_is_in_flight_the_more_faults_in_a_row_it_takes() -> None:
    endpoint = Endpoint("http://one")
    endpoint.in_flight = 100
    told = [endpoint.faulted("HTTP 500", 1.0, 1.0) for _ in range(30)]
    assert told.index(True) == 24
    assert told.count(True) == 1


def test_servers_that_meet_faults_get_fewer_requests() -> None:
    pool = Endpoints(["one", "two"])
    well, ill = pool.all
    for n in range(20):
        ill.faulted("HTTP 500", n, n) if n % 2 else ill.answered(n)
    for _ in range(30):
        chosen = pool.choose(100.0, None)
        assert chosen is not None
        chosen.begin()
    assert 1 <= ill.in_flight < well.in_flight


def test_another_server_is_chosen_where_there_is_one() -> None:
    pool = Endpoints(["one", "two"])
    one, two = pool.all
    two.in_flight = 50
    assert pool.choose(0.0, None) is one
    assert pool.choose(0.0, one) is two
    two.leave_out("down", 0.0)
    assert pool.choose(0.0, one) is one
    one.leave_out("down", 0.0)
    assert pool.choose(0.0, one) is None


def test_a_rest_is_as_long_as_asked_or_doubles_and_ends_by_itself() -> None:  # P12
    endpoint = Endpoint("http://one")
    assert endpoint.rest(7.0, 0.0) == (7.0, True)
    assert endpoint.rest(7.0, 1.0) == (7.0, False)  # said to several at once
    assert not endpoint.free(7.9)
    assert endpoint.free(8.0)
    least = [endpoint.rest(0.0, 100.0 * n)[0] for n in range(1, 6)]
    assert least == sorted(least)
    endpoint.answered(1000.0)
    assert endpoint.rest(0.0, 2000.0)[0] <= 2 * endpoints.BACKOFF_SECONDS


def test_paths_lie_under_the_base_or_the_root() -> None:
    endpoint = Endpoints(["host:8000/v1/chat/completions"]).all[0]
    assert endpoint.at("/models") == "http://host:8000/v1/models"
    assert endpoint.at("//metrics") == "http://host:8000/metrics"


def test_a_server_that_only_ever_asks_for_patience_is_told_of_once_a_minute() -> None:
    endpoint, now, told = Endpoint("http://one"), 100.0, []
    while now < 400.0:  # rests of two seconds, for five minutes
        endpoint.refusals = 0
        _, news = endpoint.rest(2.0, now)
        if news and endpoint.worth_telling(2.0, now):
            told.append(now)
        now += 2.1
    gaps = [later - earlier for earlier, later in zip([100.0, *told], told, strict=False)]
    assert len(told) == 4
    assert all(60 <= gap < 63 for gap in gaps), gaps


def test_a_long_rest_is_told_of_at_once_and_a_reply_ends_the_tale() -> None:
    endpoint = Endpoint("http://one")
    endpoint.rest(30.0, 100.0)
    assert endpoint.worth_telling(30.0, 100.0)
    endpoint.rest(30.0, 131.0)
    assert not endpoint.worth_telling(30.0, 131.0)
    endpoint.answered(161.0)
    endpoint.rest(2.0, 170.0)
    assert not endpoint.worth_telling(2.0, 170.0)
