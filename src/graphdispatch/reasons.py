"""Why a step ran as it did: one closed, machine-readable list with a sentence for each reason."""

from enum import StrEnum
from typing import Self


class Explained(StrEnum):
    """A closed list of answers: the value of each, and as ``text`` the sentence for people."""

    text: str

    def __new__(cls, value: str, text: str) -> Self:
        """The answer of this value."""
        self = str.__new__(cls, value)
        self._value_, self.text = value, text
        return self


class Reason(Explained):
    """The reason that every decision carries: its value, and as ``text`` the sentence for people, with a remedy if
    there is one."""

    is_graph: bool
    """Whether a graph served the step. A step that captured or checked a graph counts as eager."""
    leads_to_graph: bool
    """Whether the step ran eagerly on the way to a graph, or as a part of one. ``strict`` allows such steps."""

    EXACT = "exact", "a graph of exactly this size served the batch"
    PADDED = "padded", "the batch was padded, and the next larger graph served it"
    IN_PARTS = "in_parts", "several graphs served the batch, each some of its rows"
    CAPTURED_NOW = "captured_now", "this call captures the graph; its result comes from eager"
    VERIFIED_NOW = "verified_now", "this call compares the graph with eager; its result comes from eager"

    DISABLED = "disabled", "graphs are switched off (mode NONE, or disable_mode)"
    ASLEEP = "asleep", "sleep() released the graphs; call wake() to capture them again"
    FROZEN = (
        "frozen",
        "freeze() forbids captures and comparisons, and no graph was compared for such a batch before; unfreeze(), or "
        "prewarm before freeze() with real examples, under the same inference_mode and autocast",
    )
    FIRST_SIGHTING = (
        "first_sighting",
        "this size has no graph; it is captured when it comes again",
    )
    CONSTANT_CHANGES = (
        "constant_changes",
        "an argument that is no tensor has a new value in each call, and each value needs a graph of its own; pass it "
        "as a tensor",
    )
    CAPTURE_WAITS = (
        "capture_waits",
        "there is no time for the capture yet; prewarm() (capture_graph() of a manager), or raise capture_share",
    )
    CACHE_FULL = (
        "cache_full",
        "the cache is full of graphs that are used more often; raise max_cached_graphs or memory_budget_bytes",
    )
    ABOVE_LARGEST_SIZE = (
        "above_largest_size",
        "the batch is larger than the largest graph; add a larger size to those that you gave, or raise max_size= "
        "(max_batch_size of a CUDAGraphConfig)",
    )
    NOT_CAPTURED = "not_captured", "no graph is captured for this key"
    MODE_MISMATCH = "mode_mismatch", "this call asks for a mode that these graphs do not serve"
    POLICY = "policy", "the dispatch policy chose eager"
    INSIDE_CAPTURE = "inside_capture", "another capture is recording this call, and records its operators one by one"
    MODE_ACTIVE = (
        "mode_active",
        "a mode, transform or trace of torch is around the call, which a replay would pass by: TorchFunctionMode, "
        "TorchDispatchMode, torch.func, torch.jit.trace, or another default device; call outside of it",
    )
    INSIDE_REPLAY = (
        "inside_replay",
        "a break, a pad function or a finalizer made this call during the replay of a graph in the same memory",
    )
    NOT_INITIALIZED = "not_initialized", "the graph keys are not initialised; call initialize_cudagraph_keys first"
    MODE_EXCLUDED = "mode_excluded", "a graph would serve the batch, but this call excludes the graph's mode"
    VARIANT_NOT_CAPTURED = "variant_not_captured", "no graph is captured for this variant or a larger one"
    QUERY_LEN_NOT_CAPTURED = (
        "query_len_not_captured",
        "no graph is captured for uniform decode of this query length; capture one, and add its key",
    )
    MIXED_BATCH = "mixed_batch", "the batch is mixed, and only uniform decode batches have graphs"
    TOO_MANY_REQUESTS = "too_many_requests", "the graphs that are large enough were captured for fewer requests"

    NO_ROWS = "no_rows", "the batch has no rows"
    NO_TENSORS = "no_tensors", "no argument is a tensor"
    ROWS_DISAGREE = "rows_disagree", "the arguments named in dynamic= have different numbers of rows"
    NEEDS_GRADIENTS = "needs_gradients", "the call needs gradients; call eval(), and use torch.no_grad(), for graphs"
    TENSOR_SUBCLASS = "tensor_subclass", "an argument is a tensor subclass or not a strided tensor"
    DEVICES_DISAGREE = "devices_disagree", "the arguments are on different devices"
    DEVICE_UNSUPPORTED = "device_unsupported", "the arguments are on a device that the backend does not serve"
    UNGUARDED_ARGUMENT = "unguarded_argument", "an object among the arguments cannot be compared; name it in static="
    ALIASED_ARGUMENTS = "aliased_arguments", "two arguments share memory, and the call writes to one of them"
    ADDRESS_CHANGED = "address_changed", "a static argument, a weight or a captured variable has moved in memory"
    ARGUMENTS_CHANGED = "arguments_changed", "the arguments do not match those that this graph was captured with"

    STATE_TOO_LARGE = "state_too_large", "the state that the call writes is too large to save; raise state_limit_bytes"
    STATE_SHARED = (
        "state_shared",
        "other threads, or what this call interrupts, work on callables that share its state, and did not end in time",
    )
    STATE_REBOUND = (
        "state_rebound",
        "the call changes Python state (an attribute, variable or entry); it must keep it in tensors",
    )
    STATE_UNSEEN = (
        "state_unseen",
        "the call reads or advances Python state that cannot be compared at each call (an iterator, Python's random "
        "numbers, too many objects)",
    )
    PADDING_WRITES_STATE = (
        "padding_writes_state",
        "padding rows changed state that the real rows leave alone; give a pad rule that points at scratch "
        "rows and padding_writes='allow'",
    )
    ROWS_MIX = (
        "rows_mix",
        "rows of the batch depend on each other, so that padding would change real ones; have a size for it (sizes=)",
    )
    PATH_CHANGES = (
        "path_changes",
        "Python takes another path for this batch than for the graph's size; have a size for it (sizes=)",
    )
    PADDING_UNPROVEN = (
        "padding_unproven",
        "the batch needs padding, and nothing shows that its rows are independent; capture the graph from a smaller "
        "example (size=), or give rows='independent' in the options",
    )
    OUTPUT_UNSUPPORTED = "output_unsupported", "an output is an object that a graph cannot return"
    OUTPUT_ROWS_UNKNOWN = "output_rows_unknown", "the rows of an output do not follow the batch, so it cannot be cut"

    CALL_RAISED = "call_raised", "the call itself raised during its capture or comparison, and the caller got the error"
    CAPTURE_UNSAFE = "capture_unsafe", "the model does something that a graph cannot hold"
    CAPTURE_FAILED = "capture_failed", "the capture failed"
    OUT_OF_MEMORY = "out_of_memory", "the capture ran out of memory"
    REPLAY_FAILED = "replay_failed", "the replay failed"
    NO_GAIN = (
        "no_gain",
        "eager runs such a batch faster than the graph; put more of the work into the call, or have a size nearer to "
        "the batch (sizes=)",
    )
    VERIFICATION_FAILED = "verification_failed", "the graph's result differed from eager's"

    @property
    def sentence(self) -> str:
        """Why the step ran as it did: ``text`` without the remedy."""
        return self.text if self in _WITHOUT_REMEDY else self.text.partition("; ")[0]

    @property
    def remedy(self) -> str:
        """What to do about it, or what will happen by itself; empty where there is nothing to say."""
        return "" if self in _WITHOUT_REMEDY else self.text.partition("; ")[2]


_WITHOUT_REMEDY = (Reason.CAPTURED_NOW, Reason.VERIFIED_NOW)
_BY_GRAPH = (Reason.EXACT, Reason.PADDED, Reason.IN_PARTS)
_ON_THE_WAY = (
    Reason.FIRST_SIGHTING,
    Reason.CAPTURE_WAITS,
    Reason.CAPTURED_NOW,
    Reason.VERIFIED_NOW,
    Reason.INSIDE_CAPTURE,
    Reason.INSIDE_REPLAY,
)
for _reason in Reason:
    _reason.is_graph, _reason.leads_to_graph = _reason in _BY_GRAPH, _reason in _ON_THE_WAY
