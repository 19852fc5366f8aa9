"""The tables of the store.

One version number stands in the store itself; a store of another version is refused rather than guessed at. Knows
nothing of what the rows mean.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

# 2: files and batches. 3: rollouts. 4: what gateways serve. 5: the store's identity. 6: the fleet's secret. 7: how
# often a batch's results were begun to be written. 8: what of reservations can be given back. So far versions only
# added tables, and an older store is given those it lacks.
SCHEMA_VERSION = 8

MAX_MODEL_CHARACTERS = 255

_NAME = 64
_ID = 64

metadata = MetaData()

# One row: the schema's version, and a number that every change of keys raises, so that servers need not read them all.
state = Table(
    "penstock_state",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("schema_version", Integer, nullable=False),
    Column("keys_version", BigInteger, nullable=False),
)

# One row: a random text by which servers tell whether they share a store, however each of them reaches it.
identity = Table(
    "penstock_identity",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("value", String(_ID), nullable=False),
)

# One row: a random text that servers and gateways know each other by. It never leaves them.
fleet_secret = Table(
    "penstock_fleet_secret",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("value", String(_ID), nullable=False),
)

# A revoked key keeps its row: its name is not given again, and a store that ever had keys is never open.
keys = Table(
    "penstock_keys",
    metadata,
    Column("name", String(_NAME), primary_key=True),
    Column("terms", Text, nullable=False),  # JSON of `tenants.KeyTerms`
    Column("created_at", Float(53), nullable=False),
    Column("revoked_at", Float(53)),
)

secrets = Table(
    "penstock_secrets",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("name", String(_NAME), ForeignKey("penstock_keys.name"), nullable=False, index=True),
    Column("created_at", Float(53), nullable=False),
    Column("expires_at", Float(53)),
)

# What each metered tenant has in use; see `quotas`.
quotas = Table(
    "penstock_quotas",
    metadata,
    Column("tenant", String(_NAME), primary_key=True),
    Column("at", Float(53), nullable=False),  # the moment that the next three are right for
    Column("requests", Float(53), nullable=False),
    Column("input_tokens", Float(53), nullable=False),
    Column("output_tokens", Float(53), nullable=False),
    Column("day", String(10), nullable=False),
    Column("day_tokens", BigInteger, nullable=False),
    Column("mean_output_tokens", Float(53)),  # of the tenant's answers; null before the first
)

# One row for each metered request under way, and for a day one, nobody's, for each that was moved to another server.
leases = Table(
    "penstock_leases",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("tenant", String(_NAME), nullable=False),
    Column("expires_at", Float(53), nullable=False),
    Index("penstock_leases_of_tenant", "tenant", "expires_at"),
)

# The least that was in each bucket of its tenant since a request under way was admitted; see `reservations`.
reservations = Table(
    "penstock_reservations",
    metadata,
    Column("lease_id", String(36), primary_key=True),
    Column("tenant", String(_NAME), nullable=False, index=True),
    Column("began_at", Float(53), nullable=False),
    Column("requests", Float(53), nullable=False),
    Column("input_tokens", Float(53), nullable=False),
    Column("output_tokens", Float(53), nullable=False),
)

usage = Table(
    "penstock_usage",
    metadata,
    Column("tenant", String(_NAME), primary_key=True),
    Column("model", String(MAX_MODEL_CHARACTERS), primary_key=True),
    Column("day", String(10), primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("refused", BigInteger, nullable=False),
    Column("errors", BigInteger, nullable=False),
)

# A file is there for its tenant once it is complete; see `files`.
files = Table(
    "penstock_files",
    metadata,
    Column("id", String(_ID), primary_key=True),
    Column("tenant", String(_NAME), nullable=False),
    Column("filename", String(255), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("is_complete", Boolean, nullable=False),
    Index("penstock_files_of_tenant", "tenant", "created_at", "id"),
)

file_chunks = Table(
    "penstock_file_chunks",
    metadata,
    Column("file_id", String(_ID), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)

# Who works on a batch holds it until `held_until`, and each holder has a larger `term` than the one before.
batches = Table(
    "penstock_batches",
    metadata,
    Column("id", String(_ID), primary_key=True),
    Column("tenant", String(_NAME), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("model", String(MAX_MODEL_CHARACTERS)),  # null: its file has none, which will be told
    Column("completion_window", String(16), nullable=False),
    Column("labels", Text, nullable=False),  # JSON of what the API calls metadata
    Column("status", String(16), nullable=False),
    Column("input_file_id", String(_ID), nullable=False),
    Column("output_file_id", String(_ID)),
    Column("error_file_id", String(_ID)),
    Column("errors", Text, nullable=False),  # JSON of what is wrong with the file
    Column("created_at", Float(53), nullable=False),
    Column("expires_at", Float(53), nullable=False),
    Column("moments", Text, nullable=False),  # JSON: status to the Unix time at which it began
    Column("num_rows", Integer, nullable=False),
    Column("num_completed", Integer, nullable=False),
    Column("num_failed", Integer, nullable=False),
    Column("term", BigInteger, nullable=False),
    Column("held_until", Float(53), nullable=False),
    Index("penstock_batches_of_tenant", "tenant", "created_at", "id"),
    Index("penstock_batches_by_status", "status", "created_at"),
)

# One row for each line of a batch that has not ended; see `batch_work`.
batch_rows = Table(
    "penstock_batch_rows",
    metadata,
    Column("batch_id", String(_ID), primary_key=True),
    Column("line", Integer, primary_key=True, autoincrement=False),
    Column("custom_id", String(512), nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("body", Text, nullable=False),
    Column("result", Text),  # the line of the output or error file
    Index("penstock_batch_rows_by_state", "batch_id", "state", "line"),
)

# How often a batch that has not ended was begun to be brought to its end; no row: never.
batch_endings = Table(
    "penstock_batch_endings",
    metadata,
    Column("batch_id", String(_ID), primary_key=True),
    Column("attempts", Integer, nullable=False),
)

# How each model's versions are rolled out, and what each gateway has seen of them; see `rollouts`.
rollouts = Table(
    "penstock_rollouts",
    metadata,
    Column("model", String(MAX_MODEL_CHARACTERS), primary_key=True),
    Column("document", Text, nullable=False),  # JSON; empty: none yet
)

rollout_evidence = Table(
    "penstock_rollout_evidence",
    metadata,
    Column("model", String(MAX_MODEL_CHARACTERS), primary_key=True),
    Column("gateway", String(36), primary_key=True),
    Column("epoch", BigInteger, nullable=False),  # of the rollout, in which it was seen
    Column("document", Text, nullable=False),  # JSON
)

# What each gateway that runs serves, so that nobody begins a rollout of what nobody serves.
rollout_gateways = Table(
    "penstock_rollout_gateways",
    metadata,
    Column("gateway", String(36), primary_key=True),
    Column("heard_at", Float, nullable=False),  # Unix time
    Column("document", Text, nullable=False),  # JSON
)
