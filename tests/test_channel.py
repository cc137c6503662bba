"""ZeroMQ tells: real sockets, a subscriber that never reads, messages that are not ours."""

import time

import zmq

from hstransport.channel import Publisher, Subscriber
from hstransport.protocol import ROWS, Message


def message(seq, meta=b"m"):
    return Message("ab12", 0, ROWS, seq, 64 * seq, 128, meta)


def receive(subscriber, count, timeout_s=5.0):
    got = []
    deadline = time.monotonic() + timeout_s
    while len(got) < count and time.monotonic() < deadline:
        m = subscriber.receive()
        if m is None:
            time.sleep(0.005)
        else:
            got.append(m)
    return got


def connect(publisher, endpoint):
    subscriber = Subscriber()
    subscriber.connect(endpoint)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:  # PUB drops until the subscription has arrived
        publisher.send([message(0)])
        if subscriber.wait(0.05):
            return subscriber
    raise AssertionError("never subscribed")


def test_messages_arrive_in_order_with_metadata_and_place(ring_dir):
    endpoint = f"ipc://{ring_dir}/a.sock"
    publisher = Publisher(endpoint)
    assert (ring_dir / "a.sock").stat().st_mode & 0o777 == 0o600
    subscriber = connect(publisher, endpoint)
    for seq in range(1, 50):
        publisher.send([message(seq)])
    got = [m for m in receive(subscriber, 49) if m.seq]
    assert [m.seq for m in got] == list(range(1, 50))
    assert got[0] == message(1)
    subscriber.close()
    publisher.close()
    assert not (ring_dir / "a.sock").exists()


def test_long_metadata_stay_in_the_ring(ring_dir):
    endpoint = f"ipc://{ring_dir}/a.sock"
    publisher = Publisher(endpoint)
    subscriber = connect(publisher, endpoint)
    publisher.send([message(5, b"x" * 100_000)])
    (got,) = [m for m in receive(subscriber, 1) if m.seq == 5]
    assert got.meta == b""
    subscriber.close()
    publisher.close()


def test_subscriber_that_never_reads_does_not_block_the_server(ring_dir):
    endpoint = f"ipc://{ring_dir}/a.sock"
    publisher = Publisher(endpoint)
    subscriber = connect(publisher, endpoint)
    for seq in range(20_000):  # far beyond both queues and the socket's buffers
        publisher.send([message(seq, b"x" * 4000)])
    subscriber.close()
    publisher.close()


def test_malformed_messages_are_counted_and_skipped(ring_dir):
    endpoint = f"ipc://{ring_dir}/a.sock"
    context = zmq.Context()
    stranger = context.socket(zmq.PUB)
    stranger.bind(endpoint)
    subscriber = Subscriber()
    subscriber.connect(endpoint)
    good = [1, "ab12", 0, [[ROWS, 7, 64, 128, b"m"]]]
    import msgpack

    deadline = time.monotonic() + 5
    got = None
    while got is None and time.monotonic() < deadline:
        stranger.send(b"\xc1 nonsense")
        stranger.send_multipart([b"a", b"b"])
        stranger.send(msgpack.packb([99, *good[1:]]))
        stranger.send(msgpack.packb([*good[:3], [[ROWS, 7, 64, 128]]]))
        stranger.send(msgpack.packb(good))
        time.sleep(0.01)
        got = subscriber.receive()
    assert got is not None
    assert got.seq == 7
    assert subscriber.malformed >= 1
    subscriber.close()
    stranger.close(0)
    context.term()
