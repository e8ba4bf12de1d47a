# SPDX-License-Identifier: Apache-2.0
"""The shortest script that still fails: delta debugging over its events, then over what each one asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from nwor_lab.engines.traffic import Event

Events = list[Event]


def shrink(events: Events, fails: Callable[[Events], bool], runs: int) -> Events:
    """Fewer and simpler events that still fail; `events` itself does.

    fails: runs a script and says whether it fails in the same way.
    runs: how often it may be asked, at most.
    """

    def ask(fewer: Events) -> bool:
        nonlocal runs
        if not fewer or not runs:
            return False
        runs -= 1
        return fails(fewer)

    size, shorter = (len(events) + 1) // 2, False
    while size and runs:
        start, shorter = 0, False
        while start < len(events):
            fewer = events[:start] + events[start + size :]
            if ask(fewer):
                events, shorter = fewer, True
            else:
                start += size
        size = size // 2 or int(shorter)
    for place in range(len(events)):
        tries = simpler(events[place])
        while (event := next(tries, None)) is not None:
            if ask(changed := [*events[:place], event, *events[place + 1 :]]):
                events, tries = changed, simpler(event)
    return events


def simpler(event: Event) -> Iterator[Event]:
    """The event with one thing less, or with half of one."""
    if event.prompt is None:
        return
    fields = event.sampling
    if event.follows:
        yield replace(event, follows="")
    for name in ("n", "structured_outputs", "stop"):
        if name in fields:
            yield replace(event, sampling={key: value for key, value in fields.items() if key != name})
    if event.step:
        yield replace(event, step=0)
    if half := len(event.prompt) // 2:
        yield replace(event, prompt=event.prompt[:half])
    if half := fields["max_tokens"] // 2:
        yield replace(event, sampling=fields | {"max_tokens": half})
