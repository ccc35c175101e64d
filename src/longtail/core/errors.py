"""The errors that a user can meet. Each message is one sentence: what is wrong, where, what to do."""


class LongtailError(Exception):
    """Base of every error that Longtail raises on purpose; the CLI prints its message without a traceback."""


class ConfigError(LongtailError):
    """A job file, or a value in it, cannot work. Raised before anything starts."""


class ModelError(LongtailError):
    """A model folder is unsupported, incomplete or inconsistent; names the file or the tensor."""


class DataError(LongtailError):
    """A task's data cannot be used; names the file and the row."""


class RankerError(LongtailError):
    """A ranker cannot be loaded, trained or used; names the folder or the data."""


class ServerError(LongtailError):
    """Another server cannot be used; names its URL and what it said."""


class RequestError(LongtailError):
    """A generation request that no engine could serve; names the request and the field."""


class RewardError(LongtailError):
    """A reward function failed, timed out or returned something unusable; ends its pipeline only."""


class CapacityError(LongtailError):
    """Something does not fit (memory, lanes, context, workers); says what is wanted and what there is."""


class TrainingError(LongtailError):
    """Training cannot go on, for example because a gradient is not finite; weights are as before the step."""


class CheckpointError(LongtailError):
    """A checkpoint cannot be written or read; names the file."""


class PeerLost(LongtailError):
    """A collective failed because another worker is gone or did not answer in time."""


class Diverged(LongtailError):
    """Ranks of a tensor-parallel group, which must do the same, did not."""
