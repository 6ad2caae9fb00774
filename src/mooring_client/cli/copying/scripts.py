"""The scripts of `mooring cp` in the container, their output, and why they failed."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Final

from mooring_client.cli.copying.archives import CopyFailed
from mooring_client.failures import StreamInterrupted
from mooring_client.stream_messages import Channel

if TYPE_CHECKING:
    from mooring_client.sync.client import Mooring
    from mooring_client.sync.streams import Command

# The toolbox of the node has what the image lacks.
_SHELLS: Final = ("/bin/sh", "/.mooring/bin/sh")
_NOT_RUN: Final = frozenset({126, 127})  # a program cannot be run, or was not found
_REFUSED: Final = 45
_NO_TAR: Final = (
    "the image has no shell or no tar, and its node had no toolbox when the instance started; install tar, "
    "or ask an admin to run `mooring toolbox` on the node, and start a new instance"
)
_LONGEST_ERRORS: Final = 4096
_LONGEST_ANSWER: Final = 4096
_SET_UP: Final = f"""\
unset TAR_OPTIONS
PATH="${{PATH:+$PATH:}}/.mooring/bin:/.mooring/applets"
fail() {{ echo "$1" >&2; exit {_REFUSED}; }}
"""

# Writes an archive after the line `read`. Arguments: folder, name in it, and `h` to follow links.
READ: Final = """
[ -e "$1/$2" ] || [ -L "$1/$2" ] || fail "there is no $2 in $1"
echo read
exec tar -c"$3"f - -C "$1" "./$2"
"""

# Unpacks an archive. Arguments: what comes (file, folder, content or archive), the path, the path's folder
# and name, a `/` if the path must be a folder, the name of what comes, and a temporary name. It prints what
# the archive must have, and the client sends it then: `into` a folder with the name of what comes, the
# content of a `new` folder, content to `merge`, a `file` with the temporary name, or any archive.
# At the end, or if it fails, it prints a further line, and takes the rest of its input: an engine that closes
# the input while more arrives may lose the output.
WRITE: Final = """
case $1 in
archive)
    [ -d "$2" ] || fail "$2 is not a folder"
    echo archive
    tar -xpf - -C "$2" ;;
file)
    if [ -d "$2" ]; then
        folder=$2 name=$6
    else
        [ -z "$5" ] || fail "there is no folder $2"
        folder=$3 name=$4
    fi
    [ -d "$folder" ] || fail "there is no folder $folder"
    [ ! -d "$folder/$name" ] || fail "$folder/$name is a folder"
    echo file
    tar -xpof - -C "$folder" && mv -f -- "$folder/$7" "$folder/$name" || { rm -f -- "$folder/$7"; false; } ;;
*)
    if [ ! -d "$2" ]; then
        mkdir -- "$2" || exit
        echo new
    elif [ "$1" = content ]; then
        echo merge
    else
        [ -d "$2/$6" ] || { [ ! -e "$2/$6" ] && [ ! -L "$2/$6" ]; } || fail "$2/$6 is not a folder"
        echo into
    fi
    tar -xpof - -C "$2" ;;
esac
code=$?
echo ended
cat >/dev/null
exit "$code"
"""


class RunningScript:
    """A script in a container, which may have been replaced by anything.

    Attributes:
        answer: its first line of output; empty if it is none of `answers`.
    """

    def __init__(self, command: "Command", answers: Collection[str]) -> None:
        self.command = command
        self._parts = iter(command)
        self._rest = b""
        self._errors = bytearray()
        line = self._first_line()
        self.answer = line if line in answers else ""

    def output(self) -> Iterator[bytes]:
        """Yield its output after the first line.

        Raises:
            StreamInterrupted: the stream ended before the script.
        """
        if self._rest:
            yield self._rest
            self._rest = b""
        for channel, data in self._parts:
            if channel is Channel.STDOUT:
                yield data
            else:
                self._errors += data
                del self._errors[:-_LONGEST_ERRORS]

    def ended(self) -> int:
        """Wait for its end, and return the exit code."""
        for _data in self.output():
            pass
        return 1 if self.command.exit_code is None else self.command.exit_code

    def kill(self) -> None:
        """End it, and drop its output. Otherwise closing the connection waits up to 10 s for the output."""
        if self.command.exit_code is None:
            with suppress(StreamInterrupted):
                self.command.signal("KILL")
                for _part in self.command:
                    pass

    def messages(self) -> list[str]:
        """The last lines of its error output."""
        return self._errors.decode(errors="replace").splitlines()

    def failure(self) -> CopyFailed:
        """Why it failed."""
        code = self.command.exit_code
        if code in _NOT_RUN:
            return CopyFailed(_NO_TAR)
        return CopyFailed("; ".join(self.messages()) or f"tar in the instance ended with exit code {code}")

    def _first_line(self) -> str:
        # If the engine cannot run the shell, the output is its own message.
        found = bytearray()
        for data in self.output():
            found += data
            if b"\n" in data or len(found) > _LONGEST_ANSWER:
                break
        line, _newline, self._rest = bytes(found).partition(b"\n")
        return line.decode(errors="replace")


@contextmanager
def running_script(
    client: "Mooring", instance_id: str, script: str, arguments: Sequence[str], answers: Collection[str]
) -> Iterator[RunningScript]:
    """Run a script in the image's shell, or in that of the toolbox. It has given one of the answers.

    Raises:
        CopyFailed: it ended without an answer, or an argument is not UTF-8.
    """
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise CopyFailed(f"{argument!r} is not UTF-8; copy the folder that has it") from None
    for shell in _SHELLS:
        with ExitStack() as exits:
            command = [shell, "-c", _SET_UP + script, "sh", *arguments]
            opened = client.instances.exec_stream(instance_id, command, stdin=script is WRITE)
            found = RunningScript(exits.enter_context(opened), answers)
            if found.answer:
                try:
                    yield found
                except BaseException:
                    found.kill()
                    raise
                return
            found.command.close_stdin()
            if found.ended() not in _NOT_RUN or shell == _SHELLS[-1]:
                raise found.failure()
