"""Threads that read for a loader: in the order of what they are given, and more of them when they are too slow."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar

_Result = TypeVar("_Result")
_LOOK = 4  # steps between two looks at whether they are waited for
_WORTH = 0.05  # of the time: less waiting is not worth a thread

_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Readers:
    """At first `count` threads, at most `most`. What they read does not depend on how many they are."""

    def __init__(self, count: int, most: int) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._most = most
        self._steps, self._waited_s, self._took_s = 0, 0.0, 0.0
        for _ in range(max(1, count)):
            self._add()
        # Who never closes a loader must not wait for its threads for ever, nor may they be cut off while they compute.
        atexit.register(self.close)

    def __len__(self) -> int:
        return len(self._threads)

    def submit(self, function: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        future: Future[_Result] = Future()
        self._tasks.put((future, function, arguments))
        return future

    def note(self, waited_s: float, took_s: float) -> None:
        """A step took so long, of which it waited for its patches: one more thread if that is often so."""
        self._steps, self._waited_s, self._took_s = self._steps + 1, self._waited_s + waited_s, self._took_s + took_s
        if self._steps < _LOOK:
            return
        if len(self) < self._most and self._waited_s > _WORTH * self._took_s:
            self._add()
        self._steps, self._waited_s, self._took_s = 0, 0.0, 0.0

    def _add(self) -> None:
        thread = threading.Thread(target=self._work, name=f"loader-{len(self)}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function, arguments = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
            del task, future, function, arguments  # a thread that waits holds no batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what has not begun, and wait for the rest."""
        atexit.unregister(self.close)
        while True:
            try:
                task = self._tasks.get_nowait()
            except Empty:
                break
            if task is not None:
                task[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
