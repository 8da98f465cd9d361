"""How often pages were requested, and how long they took to make."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from accelplane.node.exposition import Family

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class PageCounts:
    """Each metrics page shows those before it."""

    def __init__(self) -> None:
        self._buckets: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}
        self._requests: Counter[tuple[str, int]] = Counter()

    def record(self, page: str, seconds: float) -> None:
        """Counts the time to make a page."""
        self._buckets.setdefault(page, [0] * (len(_BOUNDS) + 1))[bisect_left(_BOUNDS, seconds)] += 1
        self._seconds[page] = self._seconds.get(page, 0.0) + seconds

    def answered(self, page: str, code: int) -> None:
        """Counts a request by its status code."""
        self._requests[page, code] += 1

    def families(self) -> Sequence[Family]:
        took = Family("accelplane_page_seconds", "Time to make a page.", "histogram")
        for page, buckets in sorted(self._buckets.items()):
            took.add_histogram(_BOUNDS, buckets, self._seconds[page], {"page": page})
        requests = Family("accelplane_page_requests_total", "Requests of pages, by status code.", "counter")
        for (page, code), count in sorted(self._requests.items()):
            requests.add(count, {"page": page, "code": str(code)})
        return [family for family in (took, requests) if len(family)]
