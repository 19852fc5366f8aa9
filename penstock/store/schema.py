"""The tables of the store.

One version number stands in the store itself; a store of another version is refused rather than guessed at. Knows
nothing of what the rows mean.
"""

from sqlalchemy import BigInteger, Column, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text

SCHEMA_VERSION = 1

_NAME = 64

metadata = MetaData()

# One row: the schema's version, and a number that every change of keys raises, so that servers need not read them all.
state = Table(
    "penstock_state",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("schema_version", Integer, nullable=False),
    Column("keys_version", BigInteger, nullable=False),
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

# One row for each metered request under way.
leases = Table(
    "penstock_leases",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("tenant", String(_NAME), nullable=False),
    Column("expires_at", Float(53), nullable=False),
    Index("penstock_leases_of_tenant", "tenant", "expires_at"),
)

usage = Table(
    "penstock_usage",
    metadata,
    Column("tenant", String(_NAME), primary_key=True),
    Column("model", String(255), primary_key=True),
    Column("day", String(10), primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("refused", BigInteger, nullable=False),
    Column("errors", BigInteger, nullable=False),
)
