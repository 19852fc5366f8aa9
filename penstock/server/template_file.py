"""The file that `--chat-template` names. Knows nothing of what is in it."""

from penstock.errors import ConfigError

_MAX_TEMPLATE_BYTES = 1024 * 1024


def read_template(path: str) -> str:
    """Return the text of the file that `--chat-template` names. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_TEMPLATE_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError("--chat-template", path, f"it cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError("--chat-template", path, "it is not UTF-8 text") from error
    if not data.strip():
        raise ConfigError("--chat-template", path, "it is empty")
    if len(data) > _MAX_TEMPLATE_BYTES:
        raise ConfigError("--chat-template", path, f"it is larger than {_MAX_TEMPLATE_BYTES} bytes")
    return text
