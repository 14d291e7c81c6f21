"""Stop strings in streamed text: what could still become one is held back."""

from collections.abc import Sequence


class StopStrings:
    """Feed text piece by piece; get back what is safe to show."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """(text to show, the stop string that was found or ""): text ends before a found one."""
        if not self._stops:
            return text, ""
        self._held += text
        found = [(self._held.find(s), s) for s in self._stops if s in self._held]
        if found:
            at, stop = min(found)
            shown, self._held = self._held[:at], ""
            return shown, stop
        keep = max(self._overlap(s) for s in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, ""

    def flush(self) -> str:
        """What is still held back."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest proper beginning of `stop` at the end of the held text."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
