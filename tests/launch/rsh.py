#!/usr/bin/env python3
"""A stand-in for ssh and sshd: rsh.py serve SOCKET on a host, rsh.py HOST COMMAND here.

As with ssh, the command runs as a child of the server, in a session of its own and without the caller's environment;
it has the caller's output; its standard input ends when the client does. $RSH_DIR has HOST.socket; RSH_LOG is a file to
which the client appends its arguments and its environment, for the test to read.
"""

import array
import os
import socket
import subprocess
import sys
import threading


def copy(read, write, close):
    while True:
        try:
            data = read(65536)
            if not data:
                break
            write(data)
        except OSError:
            break
    close()


def answer(connection):
    with connection:
        data, control, _, _ = connection.recvmsg(65536, socket.CMSG_SPACE(8))
        out, err = array.array("i", control[0][2])
        environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
        process = subprocess.Popen(["sh", "-c", data.decode()], stdin=subprocess.PIPE, stdout=out, stderr=err,
                                   env=environment, start_new_session=True, cwd="/", bufsize=0)  # fmt: skip
        os.close(out)
        os.close(err)
        threading.Thread(target=copy, daemon=True,
                         args=(connection.recv, process.stdin.write, process.stdin.close)).start()  # fmt: skip
        code = process.wait()
        try:
            connection.send(bytes([code if code >= 0 else 255]))
        except OSError:
            pass


def serve(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()


def call(host, command):
    log = os.environ.get("RSH_LOG")
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{sys.argv}\n{dict(os.environ)}\n")
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(f"{os.environ['RSH_DIR']}/{host}.socket")
        except FileNotFoundError:
            sys.exit(f"ssh: Could not resolve hostname {host}: Name or service not known")
        except ConnectionRefusedError:
            sys.exit(f"ssh: connect to host {host} port 22: Connection refused")
        fds = array.array("i", [1, 2])
        connection.sendmsg([command.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        threading.Thread(target=copy, daemon=True,
                         args=(lambda size: os.read(0, size), connection.sendall,
                               lambda: connection.shutdown(socket.SHUT_WR))).start()  # fmt: skip
        code = connection.recv(1)
        os._exit(code[0] if code else 255)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    try:
        call(sys.argv[1], " ".join(sys.argv[2:]))
    except SystemExit as error:
        print(error, file=sys.stderr)
        os._exit(255)
