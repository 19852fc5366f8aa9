"""Labels: the short texts that callers attach to what they send. Knows nothing of what they are attached to."""

from typing import Annotated

from pydantic import Field

from penstock.protocol.wire import at_most

MAX_LABELS = 16

_LabelName = Annotated[str, Field(max_length=64)]
_LabelText = Annotated[str, Field(max_length=512)]

Labels = Annotated[dict[_LabelName, _LabelText], Field(max_length=MAX_LABELS), at_most(MAX_LABELS)]
