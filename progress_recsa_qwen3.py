"""A progress bar over the chunks of a long prompt, through transformers' tqdm: its switches silence it.

`transformers.utils.logging.disable_progress_bar()`, `HF_HUB_DISABLE_PROGRESS_BARS=1` and `TQDM_DISABLE=1` do.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from transformers.utils import logging

# Seconds of reading after which the bar appears. [our decision]
DELAY = 5.0
# Chunks that may be launched on a GPU before the bar counts the first of them.
_AHEAD = 2

Part = TypeVar("Part")


def reading(parts: Sequence[tuple[slice, Part]], batch: int, device: torch.device) -> Iterator[tuple[slice, Part]]:
    """The parts, and over a long prompt a bar with tokens, tokens per second and the time left.

    Args:
        parts: (columns, anything) of each chunk.
        batch: rows.
        device: where the chunks run; on a GPU a chunk counts when it is done there, not when it is launched.
    """
    if len(parts) == 1:
        yield from parts
        return
    total = batch * parts[-1][0].stop
    launched: deque[tuple[int, torch.cuda.Event | None]] = deque()
    with logging.tqdm(total=total, unit="tok", unit_scale=True, desc="reading", delay=DELAY) as bar:

        def count(ahead: int) -> None:
            while len(launched) > ahead:
                tokens, event = launched.popleft()
                if event is not None:
                    event.synchronize()
                bar.update(tokens)

        for part in parts:
            yield part
            event = None
            if device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
            launched.append((batch * (part[0].stop - part[0].start), event))
            count(_AHEAD if event is not None else 0)
        count(0)
