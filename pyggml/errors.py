"""Errors for people: each names the thing, the value and the way out."""


class UserError(Exception):
    """A mistake of a person or in a file; shown as a sentence, never as a traceback."""


class ConfigError(UserError):
    """A parameter or a combination of parameters that cannot work."""


class GgufError(UserError):
    """A GGUF file that is missing, damaged, hostile or of an unknown kind."""


class ModelError(UserError):
    """A well-formed GGUF file whose model cannot be run: architecture, tensor, shape or type."""


class OutOfMemory(UserError):
    """A buffer that does not fit its device: what, how much, what is free."""


class IdError(UserError):
    """An index among an operation's sources that names a row or an expert that does not exist."""
