"""What a server accepts, found by asking it for one token in ever plainer ways."""

from collections.abc import Iterator
from dataclasses import replace

from penstock.errors import RemoteError
from penstock.tools.bench.client import StreamClient
from penstock.tools.bench.request_body import Dialect, write_body
from penstock.tools.bench.workload import FixedPrompt, PlannedRequest, Workload

# Statuses by which servers refuse a field they do not know or a prompt of a type they do not take.
_REFUSALS = ("http 400", "http 415", "http 422", "http 500", "http 501")
_PROMPT = FixedPrompt(tuple(range(1000, 1016)))


async def find_dialect(client: StreamClient, model: str, wanted: Dialect) -> Dialect:
    """Return the first dialect, from the wanted one on, in which the server answers."""
    workload = Workload(name="probe", requests=(PlannedRequest(_PROMPT, max_tokens=1),))
    first_refusal = ""
    for dialect in _plainer(wanted):
        measurement = await client.measure(write_body(workload, workload.requests[0], dialect, model), dialect)
        if measurement.error is None:
            return dialect
        first_refusal = first_refusal or f"{measurement.error}: {measurement.error_text}"
        if measurement.error == "http 503":
            raise RemoteError(f"{client.url} is not ready; wait until it is ({first_refusal})")
        if measurement.error not in _REFUSALS:
            break
    right = "check --url and --model"
    if first_refusal.startswith("http 404") and not wanted.chat:
        right += ", or give --chat where the server has the chat API only"
    raise RemoteError(f"{client.url} does not answer a request for one token ({first_refusal}); {right}")


def _plainer(wanted: Dialect) -> Iterator[Dialect]:
    """Yield the wanted dialect, then those with less in them."""
    for text in [True] if wanted.text or wanted.chat else [False, True]:
        yield replace(wanted, text=text)
        if wanted.ignore_eos:
            yield replace(wanted, text=text, ignore_eos=False)
        yield replace(wanted, text=text, ignore_eos=False, usage=False)
