"""Files of users: read with an error for each kind of failure, and written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from steptime.errors import FieldError, InputFileError, nearest, shorten
from steptime.store.compiled import compiled

#: Prefixes of paths to files that the process was started with.
OPENED: Final = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
FOLDER: Final = "is a folder, not a file"
SPECIAL: Final = "is not a regular file"
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of writes without room: a full disk, a full quota, a limit on the size of files."""
ROOM_HINT: Final = "make room, or write it to another disk; nothing that was there is changed"
BUSY: Final = "is being written by another process"
BROKEN: Final = (OSError, EOFError, zlib.error)
"""Exceptions from reading or unpacking a file that is missing, damaged or cut short."""
KEY_PARTS: Final = 20
"""Largest number of parts of a dotted key in a TOML file; keys of steptime have at most five."""
ROOM: Final = 4096
"""Bytes that must fit in the folder of a file to write: one block."""


def is_file(path: str | os.PathLike[str]) -> bool:
    """True if there is a regular file; False also for an invalid name and below a locked folder."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for those two


def refuse_endless(path: str | os.PathLike[str]) -> None:
    """Refuse files that may block a reader forever, named pipes and devices, unless the shell opened them.

    Raises:
        InputFileError: it is neither a file nor a folder, nor below ``/dev/fd`` as ``<(...)`` is.
    """
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - a job reads seventy files
    except (OSError, ValueError):  # said by who reads it
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode) and not str(path).startswith(OPENED):
        raise InputFileError(str(path), SPECIAL, hint="write it to a file first")


def unreadable(path: str | os.PathLike[str], error: Exception) -> InputFileError:
    """Error for a failed attempt to open or read a file."""
    where = os.fspath(path)
    if isinstance(error, FileNotFoundError):
        return InputFileError(where, "the file does not exist", hint=_neighbour(Path(path)))
    if isinstance(error, IsADirectoryError):
        return InputFileError(where, FOLDER)
    if isinstance(error, ValueError):
        return InputFileError(ascii(where), f"is not a path: {error}")
    return InputFileError(where, f"cannot be read: {getattr(error, 'strerror', None) or error}")


def _neighbour(path: Path) -> str | None:
    """A file next to the missing one whose name is nearly the same."""
    try:
        close = nearest(path.name, (p.name for p in path.parent.glob(f"*{path.suffix}")), count=1)
    except (OSError, ValueError):
        return None
    return f"did you mean {path.parent / close[0]}?" if path.suffix and close else None


def read_bytes(path: str | os.PathLike[str], at_most: int, what: str, *, hint: str | None = None) -> bytes:
    """The content of a user's file.

    Args:
        path: the file.
        at_most: most bytes.
        what: kind of file, for the message about a larger one.
        hint: its hint.

    Raises:
        InputFileError: it is missing, a folder, no regular file, unreadable or too large.
    """
    refuse_endless(path)
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a job reads seventy files
            size = os.fstat(file.fileno()).st_size
            data = b"" if size > at_most else file.read(at_most + 1)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if max(size, len(data)) > at_most:
        raise InputFileError(
            os.fspath(path), f"is larger than {at_most / 2**20:g} MiB, too large for {what}", hint=hint
        )
    return data


def read_text(path: str | os.PathLike[str], at_most: int, what: str) -> str:
    """The text of a user's file in UTF-8, with or without a byte-order mark; arguments of :func:`read_bytes`.

    Raises:
        InputFileError: as :func:`read_bytes`, or it is not UTF-8.
    """
    data = read_bytes(path, at_most, what)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(os.fspath(path), f"is not UTF-8 text (byte {error.start})") from None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The document of a TOML text; documents of the package's files were parsed when the package was built.

    Raises:
        InputFileError: the text is not TOML, or nested too deeply; the message names the file ``where``.
    """
    found: dict[str, Any] | None = compiled(text)
    if found is not None:
        return found
    import tomllib

    refuse_long_keys(text, where)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputFileError(where, "is nested too deeply") from None
    except ValueError as error:
        raise InputFileError(where, f"is not valid TOML: {error}") from None


def refuse_long_keys(text: str, where: str) -> None:
    """Refuse a TOML text whose dotted keys have more than :data:`KEY_PARTS` parts: a reader keeps every prefix of a
    key, so that its memory grows with the square of the parts (64 kB of them took 4 GB).

    Raises:
        InputFileError: names the line.
    """
    import re

    strings = (r'"""(?:\\.|[^\\])*?"""', r"'''.*?'''", r'"(?:\\.|[^"\\\n])*"', r"'[^'\n]*'", r"#[^\n]*")
    bare = re.sub("|".join(strings), lambda found: "s" + "\n" * found.group().count("\n"), text, flags=re.S)
    parts = rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{KEY_PARTS}}}"
    found = re.search(parts, bare)
    if found is not None:
        line = bare.count("\n", 0, found.start()) + 1
        problem = f"line {line} has a key of more than {KEY_PARTS} parts"
        raise InputFileError(where, problem, hint="a key has a few parts, as in device.matrix.bf16")


def refuse_special(path: str | os.PathLike[str]) -> None:
    """Refuse to overwrite anything but a regular file.

    Raises:
        InputFileError: it is a folder, a pipe or a device.
    """
    if os.path.exists(path) and not is_file(path):  # noqa: PTH110 - as in is_file
        raise InputFileError(os.fspath(path), FOLDER if Path(path).is_dir() else SPECIAL)


def unwritable(path: str | os.PathLike[str], error: OSError) -> InputFileError:
    """Error for a failed attempt to write a file."""
    hint = ROOM_HINT if error.errno in FULL else None
    return InputFileError(os.fspath(path), f"cannot be written: {error.strerror or error}", hint=hint)


def write_whole(path: str | Path, text: str, *, make_folder: bool = False) -> None:
    """Write a text file so that a reader sees the old file or the new one, never a part.

    Args:
        path: the file.
        text: its new content.
        make_folder: create its folder if missing.

    Raises:
        InputFileError: it cannot be written.
    """
    refuse_special(path)
    try:
        if make_folder:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from None
    write_bytes(path, text.encode())


def replace_file(target: Path, data: bytes) -> None:
    """Replace a file by a complete new one with its mode, or leave it unchanged.

    The new file has no name while it is written, so that a killed process leaves nothing behind; only on a file system
    without such files (``O_TMPFILE``) it is a hidden file next to the target.

    Raises:
        OSError: it cannot be written.
    """
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
    try:
        handle = os.open(target.parent, os.O_TMPFILE | os.O_WRONLY, 0o600)
    except (AttributeError, OSError):  # another system, or a file system that has none
        _replace_named(target, data, mode)
        return
    with os.fdopen(handle, "wb") as file:
        _write_through(file, data, mode)
        part = target.with_name(f".{target.name[:64]}.{os.getpid()}.part")
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.link(f"/proc/self/fd/{handle}", part.name, dst_dir_fd=folder, follow_symlinks=True)
        except OSError:  # no /proc, or a name that a killed process left
            _replace_named(target, data, mode)
            return
        finally:
            os.close(folder)
    try:
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _replace_named(target: Path, data: bytes, mode: int) -> None:
    import tempfile

    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:64]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            _write_through(file, data, mode)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _write_through(file: BinaryIO, data: bytes, mode: int) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
    os.fchmod(file.fileno(), mode)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def refuse_unwritable(path: str | os.PathLike[str]) -> None:
    """Check before the work that a file can be written.

    Raises:
        InputFileError: the folder is missing, read-only or full, or the path is no regular file.
    """
    refuse_special(path)
    target = Path(path)
    try:
        _try_room(target.resolve().parent)
        if target.exists():
            with target.open("ab"):
                pass
    except OSError as error:
        raise unwritable(path, error) from None


def refuse_output(path: Path, option: str, example: str) -> None:
    """Check before the work that a file for the output of an option can be written.

    Args:
        path: the file.
        option: flag that names it.
        example: name of such a file, whose ending is required.

    Raises:
        FieldError: it ends otherwise.
        InputFileError: as :func:`refuse_unwritable`.
    """
    suffix = Path(example).suffix
    if path.suffix.lower() != suffix:
        hint = f"for example {option} {example}"
        raise FieldError("", option, f"{shorten(str(path))!r} does not end in {suffix}", hint=hint)
    refuse_unwritable(path)


def prepare_folder(path: str | Path) -> None:
    """Create a folder before the work, and refuse one that cannot be written to.

    Raises:
        InputFileError: it cannot be made, or it is read-only or full.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputFileError(str(path), f"cannot be made a folder: {error.strerror}") from None
    try:
        _try_room(folder)
    except OSError as error:
        raise unwritable(path, error) from None


@contextmanager
def one_writer(folder: str | Path) -> Iterator[None]:
    """Context that locks an existing folder against other writers that use this lock.

    Raises:
        InputFileError: another process writes to it.
    """
    if os.name != "posix":  # no folders to open on this system
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not lock(handle):
            raise InputFileError(str(folder), BUSY, hint="wait until it has ended, or give another folder")
        yield
    finally:
        os.close(handle)


def lock(handle: int) -> bool:
    """Lock an open file or folder until it is closed; False: another process holds the lock."""
    try:
        import fcntl
    except ImportError:  # this system has no file locks
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has no locks
        return True
    return True


def _try_room(folder: Path) -> None:
    """Raise OSError if a small file cannot be written."""
    import tempfile

    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(ROOM))
        file.flush()


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a file; a device or a pipe is written to directly.

    Raises:
        InputFileError: it cannot be written.
    """
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        replace_file(target.resolve(), data)
    except OSError as error:
        raise unwritable(path, error) from None
    except ValueError as error:
        raise InputFileError(repr(str(path)), f"not a path: {error}") from None
