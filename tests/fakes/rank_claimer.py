"""An actor that claims its ranks' devices as a replica does, without a server."""

from penstock.deploy.ray_serve.ranks import RankDevices


class RankClaimer:
    async def devices(self, bundles: list[dict[str, float]]) -> list[str]:
        self._claimed = await RankDevices.claim(bundles)
        return self._claimed.devices
