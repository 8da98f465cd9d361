"""The API server of the embedded kubelet in memory: claims, and the deletions of slices."""

from accelplane.kubelet.embedded import AllocatedClaim, ClaimApiError


class MemoryClaims:
    """Claims by namespace and name. `deletions` has the drivers whose slices were deleted, "" for all."""

    def __init__(self) -> None:
        self.claims: dict[tuple[str, str], AllocatedClaim] = {}
        self.deletions: list[str] = []
        self.failures = 0  # of the next deletions

    def allocate(self, name: str, *drivers: str, pods: tuple[str, ...] = ("pod",), uid: str = "") -> AllocatedClaim:
        """Adds a claim, or replaces it."""
        claim = AllocatedClaim(
            namespace="default", name=name, uid=uid or f"uid-{name}", drivers=drivers, reserved_for=pods
        )
        self.claims["default", name] = claim
        return claim

    async def claim(self, namespace: str, name: str) -> AllocatedClaim:
        try:
            return self.claims[namespace, name]
        except KeyError:
            raise ClaimApiError(f'resourceclaims.resource.k8s.io "{name}" not found') from None

    async def delete_slices(self, driver: str) -> None:
        if self.failures:
            self.failures -= 1
            raise ClaimApiError("connection refused")
        self.deletions.append(driver)
