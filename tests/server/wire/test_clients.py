from __future__ import annotations

from lmcache_qprotocol.messages import Hello
from lmcache_qserver.wire.clients import Client, Clients, Session

HELLO = Hello(protocol_version=1, client="test")


class FakeLifeline:
    def __init__(self) -> None:
        self.closed = 0

    def take_ring(self, ring_token: bytes) -> None:
        return None

    def close(self) -> None:
        self.closed += 1


def make(
    max_clients: int = 3, idle_s: float = 10.0, registered_idle_s: float = 100.0
) -> tuple[Clients, list[Session]]:
    gone: list[Session] = []
    clients = Clients(
        gone.append, max_clients=max_clients, idle_s=idle_s, registered_idle_s=registered_idle_s
    )
    return clients, gone


def see(clients: Clients, identity: bytes, now: float = 0.0) -> Client:
    client = clients.seen(identity, now)
    assert client is not None
    return client


def test_a_second_hello_ends_the_first_session_once() -> None:
    clients, gone = make()
    client = see(clients, b"a")
    legacy = client.session
    first = clients.say_hello(client, HELLO)
    lifeline = first.lifeline = FakeLifeline()
    second = clients.say_hello(client, HELLO)
    assert gone == [legacy, first]
    assert first.gone
    assert not second.gone
    assert lifeline.closed == 1
    assert first.token is not None
    assert second.token is not None
    assert clients.by_token(first.token) is None
    assert clients.by_token(second.token) is second
    clients.end(first)
    assert gone == [legacy, first]


def test_a_greeting_over_another_connection_ends_the_session_that_it_names() -> None:
    """Without a lifeline nothing else would tell of its end before it has been silent for long."""
    clients, gone = make()
    first = clients.say_hello(see(clients, b"a"), HELLO)
    assert first.token is not None
    again = see(clients, b"b")
    renewed = Hello(protocol_version=1, client="test", former_session=first.token)
    second = clients.say_hello(again, renewed)
    assert first.gone
    assert gone.count(first) == 1
    assert not second.gone
    unknown = Hello(protocol_version=1, client="test", former_session=b"x" * 16)
    clients.say_hello(see(clients, b"c"), unknown)
    assert not second.gone


def test_a_client_stays_native_after_its_session_is_gone() -> None:
    clients, _ = make()
    client = see(clients, b"a")
    clients.end(clients.say_hello(client, HELLO))
    assert see(clients, b"a").native
    assert client.session.gone
    assert clients.sessions == 0


def test_silent_clients_expire_and_those_with_a_lifeline_or_work_do_not() -> None:
    clients, gone = make(max_clients=10)
    idle, attached, busy, registered = (see(clients, name) for name in (b"i", b"a", b"b", b"r"))
    clients.say_hello(attached, HELLO).lifeline = FakeLifeline()
    gone.clear()
    busy.outstanding = 1
    registered.registered = True
    assert clients.expire(9.9) == 0
    assert clients.expire(10.0) == 1
    assert gone == [idle.session]
    assert clients.expire(99.0) == 0
    assert clients.expire(100.0) == 1
    assert gone == [idle.session, registered.session]
    assert len(clients) == 2


def test_a_message_keeps_a_client() -> None:
    clients, _ = make()
    see(clients, b"a", 0.0)
    see(clients, b"b", 1.0)
    see(clients, b"a", 9.0)
    assert clients.expire(11.0) == 1
    assert see(clients, b"a", 12.0).last_seen == 12.0
    assert len(clients) == 1


def test_the_longest_silent_client_makes_room_for_a_new_one() -> None:
    clients, gone = make(max_clients=2)
    first = see(clients, b"a", 0.0)
    see(clients, b"b", 1.0)
    see(clients, b"c", 2.0)
    assert gone == [first.session]
    assert len(clients) == 2


def test_when_nobody_can_be_forgotten_a_new_client_is_refused() -> None:
    clients, gone = make(max_clients=2)
    for name in (b"a", b"b"):
        see(clients, name).outstanding = 1
    assert clients.seen(b"c", 1.0) is None
    assert gone == []


def test_a_lifeline_hangs_up_before_anybody_hears_that_its_session_is_gone() -> None:
    """A reader trusts what it has read under a lease while its lifeline is open (PROTOCOL.md, `lease_ms`)."""
    order: list[str] = []

    class Noted(FakeLifeline):
        def close(self) -> None:
            order.append("hang up")

    clients = Clients(lambda session: order.append("gone"))
    client = see(clients, b"a")
    session = clients.say_hello(client, HELLO)
    session.lifeline = Noted()
    order.clear()
    clients.end(session)
    assert order == ["hang up", "gone"]
