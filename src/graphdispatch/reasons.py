"""Why a step ran as it did: one closed, machine-readable list with a sentence for each reason."""

from enum import StrEnum

__all__ = ["Reason"]


class Reason(StrEnum):
    """The reason that every decision carries. ``text`` is the sentence for people."""

    EXACT = "exact"
    PADDED = "padded"
    CAPTURED_NOW = "captured_now"
    VERIFIED_NOW = "verified_now"

    DISABLED = "disabled"
    ASLEEP = "asleep"
    FIRST_SIGHTING = "first_sighting"
    BACKING_OFF = "backing_off"
    CACHE_FULL = "cache_full"
    ABOVE_LARGEST_SIZE = "above_largest_size"
    NOT_CAPTURED = "not_captured"
    MODE_MISMATCH = "mode_mismatch"
    POLICY = "policy"
    INSIDE_CAPTURE = "inside_capture"
    INSIDE_REPLAY = "inside_replay"
    NOT_INITIALIZED = "not_initialized"
    MODE_EXCLUDED = "mode_excluded"
    VARIANT_NOT_CAPTURED = "variant_not_captured"
    QUERY_LEN_NOT_CAPTURED = "query_len_not_captured"
    MIXED_BATCH = "mixed_batch"
    TOO_MANY_REQUESTS = "too_many_requests"

    NO_ROWS = "no_rows"
    NO_TENSORS = "no_tensors"
    ROWS_DISAGREE = "rows_disagree"
    NEEDS_GRADIENTS = "needs_gradients"
    TENSOR_SUBCLASS = "tensor_subclass"
    DEVICES_DISAGREE = "devices_disagree"
    DEVICE_UNSUPPORTED = "device_unsupported"
    UNGUARDED_ARGUMENT = "unguarded_argument"
    ALIASED_ARGUMENTS = "aliased_arguments"
    ADDRESS_CHANGED = "address_changed"
    ARGUMENTS_CHANGED = "arguments_changed"
    TOO_MANY_SIGNATURES = "too_many_signatures"

    STATE_TOO_LARGE = "state_too_large"
    STATE_REBOUND = "state_rebound"
    PADDING_WRITES_STATE = "padding_writes_state"
    PADDING_UNPROVEN = "padding_unproven"
    OUTPUT_UNSUPPORTED = "output_unsupported"
    OUTPUT_ROWS_UNKNOWN = "output_rows_unknown"

    CALL_RAISED = "call_raised"
    CAPTURE_UNSAFE = "capture_unsafe"
    CAPTURE_FAILED = "capture_failed"
    OUT_OF_MEMORY = "out_of_memory"
    REPLAY_FAILED = "replay_failed"
    VERIFICATION_FAILED = "verification_failed"

    @property
    def is_graph(self) -> bool:
        """Whether a graph served the step. A step that captured or checked a graph counts as eager."""
        return self in (Reason.EXACT, Reason.PADDED)

    @property
    def leads_to_graph(self) -> bool:
        """Whether the step ran eagerly on the way to a graph, or as a part of one. ``strict`` allows such steps."""
        return self in _ON_THE_WAY

    @property
    def text(self) -> str:
        """The reason as a sentence, with a remedy if there is one."""
        return _TEXTS[self]


_ON_THE_WAY = (
    Reason.FIRST_SIGHTING,
    Reason.BACKING_OFF,
    Reason.CAPTURED_NOW,
    Reason.VERIFIED_NOW,
    Reason.INSIDE_CAPTURE,
    Reason.INSIDE_REPLAY,
)

_TEXTS: dict[Reason, str] = {
    Reason.EXACT: "a graph of exactly this size served the batch",
    Reason.PADDED: "the batch was padded, and the next larger graph served it",
    Reason.CAPTURED_NOW: "this call captured the graph; its result comes from eager",
    Reason.VERIFIED_NOW: "this call compared the graph with eager; its result comes from eager",
    Reason.DISABLED: "graphs are switched off (mode NONE, or disable_mode)",
    Reason.ASLEEP: "sleep() released the graphs; call wake() to capture them again",
    Reason.FIRST_SIGHTING: "this size was seen for the first time; it is captured when it comes again",
    Reason.BACKING_OFF: (
        "earlier graphs for this key were lost before they paid for their capture; the key must come more often before "
        "it is captured again"
    ),
    Reason.CACHE_FULL: (
        "the cache is full of graphs that are used more often; raise max_cached_graphs or memory_budget_bytes"
    ),
    Reason.ABOVE_LARGEST_SIZE: "the batch is larger than the largest graph; raise max_size to cover it",
    Reason.NOT_CAPTURED: "no graph is captured for this key",
    Reason.MODE_MISMATCH: "this call asks for a mode that these graphs do not serve",
    Reason.POLICY: "the dispatch policy chose eager",
    Reason.INSIDE_CAPTURE: "another capture is recording this call, and records its operators one by one",
    Reason.INSIDE_REPLAY: "a break made this call during the replay of a graph that shares memory with this one",
    Reason.NOT_INITIALIZED: "the graph keys are not initialised; call initialize_cudagraph_keys first",
    Reason.MODE_EXCLUDED: "a graph would serve the batch, but this call excludes the graph's mode",
    Reason.VARIANT_NOT_CAPTURED: "no graph is captured for this variant or a larger one",
    Reason.QUERY_LEN_NOT_CAPTURED: "no graph is captured for uniform decode of this query length; add it to query_lens",
    Reason.MIXED_BATCH: "the batch is mixed, and only uniform decode batches have graphs",
    Reason.TOO_MANY_REQUESTS: "the graphs that are large enough were captured for fewer requests",
    Reason.NO_ROWS: "the batch has no rows",
    Reason.NO_TENSORS: "no argument is a tensor",
    Reason.ROWS_DISAGREE: "the arguments named in dynamic= have different numbers of rows",
    Reason.NEEDS_GRADIENTS: "the call needs gradients; call it under torch.no_grad() for graphs",
    Reason.TENSOR_SUBCLASS: "an argument is a tensor subclass or not a strided tensor",
    Reason.DEVICES_DISAGREE: "the arguments are on different devices",
    Reason.DEVICE_UNSUPPORTED: "the arguments are on a device that the backend does not serve",
    Reason.UNGUARDED_ARGUMENT: "an argument is an object whose change cannot be seen; name it in static=",
    Reason.ALIASED_ARGUMENTS: "two arguments share memory, and the call writes to one of them",
    Reason.ADDRESS_CHANGED: "a static argument, a weight or a captured variable has moved in memory",
    Reason.ARGUMENTS_CHANGED: "the arguments do not match those that the graph of this key was captured with",
    Reason.TOO_MANY_SIGNATURES: "max_signatures is reached: that many signatures have graphs or failed captures",
    Reason.STATE_TOO_LARGE: "the state that the call writes is too large to save; raise state_limit_bytes",
    Reason.STATE_REBOUND: "the call rebinds a variable, a parameter or a dict entry instead of writing to it in place",
    Reason.PADDING_WRITES_STATE: (
        "padding rows changed state that the real rows leave alone; give a pad rule that points at scratch "
        "rows and padding_writes='allow'"
    ),
    Reason.PADDING_UNPROVEN: (
        "the batch needs padding, and no padded batch of this graph was compared with eager yet; capture the graph "
        "from a smaller example whose rows differ (size=), or with verify=False"
    ),
    Reason.OUTPUT_UNSUPPORTED: "an output is an object that a graph cannot return",
    Reason.OUTPUT_ROWS_UNKNOWN: "the rows of an output do not follow the batch, so its padding cannot be cut off",
    Reason.CALL_RAISED: "the call itself raised while its graph was captured or compared; the caller got the exception",
    Reason.CAPTURE_UNSAFE: "the model does something that a graph cannot hold",
    Reason.CAPTURE_FAILED: "the capture failed",
    Reason.OUT_OF_MEMORY: "the capture ran out of memory",
    Reason.REPLAY_FAILED: "the replay failed",
    Reason.VERIFICATION_FAILED: "the graph's result differed from eager's",
}
