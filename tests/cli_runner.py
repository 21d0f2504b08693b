"""The command in this process: what it prints, and its exit code."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class CliRunner:
    """Runs a main function with its own environment, standard input, and standard streams that are no terminal."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = dict(env or {})

    def invoke(
        self,
        main: Callable[[Sequence[str]], int],
        args: Sequence[str],
        input: str = "",
        env: Mapping[str, str | None] | None = None,
    ) -> Result:
        out, err = io.StringIO(), io.StringIO()
        before, stdin = dict(os.environ), sys.stdin
        for name, value in {**self._env, **(env or {})}.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        sys.stdin = io.StringIO(input)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(list(args))
        finally:
            sys.stdin = stdin
            os.environ.clear()
            os.environ.update(before)
        return Result(code, out.getvalue(), err.getvalue())
