"""The bare ZeroMQ side of ``bench_control.py``: a ROUTER whose replies all have the same frames.

Started with the size of the reply's second frame; prints its port. It ends when its standard input closes.
"""

from __future__ import annotations

import sys

import zmq


def main() -> None:
    reply = bytes(int(sys.argv[1]))
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    print(port, flush=True)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    socket.rcvtimeo = 500
    while True:
        try:
            peer, ident, _ = socket.recv_multipart()
        except zmq.Again:
            if dict(poller.poll(0)).get(sys.stdin.fileno()):
                return
            continue
        socket.send_multipart([peer, ident, reply])


if __name__ == "__main__":
    main()
