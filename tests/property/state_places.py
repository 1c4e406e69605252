"""Where the parts of random programs live, and the callables around their models, as source."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a part lives: the base of its class, how it is made, how it is called, and how its object is reached."""

    call: str
    owner: str
    init: str = ""
    top: str = ""
    members: str = ""
    base: str = ""
    needs_rows: bool = True


_OBJECT = "P_OBJ = P_Part()"
PLACES: dict[str, Place] = {
    "inline": Place("", "m"),
    "method": Place("h = self.P_run(h, ids, slots)", "m"),
    "function": Place("h = P_run(self, h, ids, slots)", "m"),
    "module": Place("h = self.P_part(h, ids, slots)", "m.P_part", "self.P_part = P_Part()", base="(nn.Module)"),
    "module_list": Place(
        "for part in self.P_parts: h = part(h, ids, slots)",
        "m.P_parts[0]",
        "self.P_parts = nn.ModuleList([P_Part()])",
        base="(nn.Module)",
    ),
    "hidden_module": Place(
        "h = self.P_parts[0](h, ids, slots)", "m.P_parts[0]", "self.P_parts = [P_Part()]", base="(nn.Module)"
    ),
    "object": Place("h = self.P_part.run(h, ids, slots)", "m.P_part", "self.P_part = P_Part()"),
    "list": Place("for part in self.P_parts: h = part.run(h, ids, slots)", "m.P_parts[0]", "self.P_parts = [P_Part()]"),
    "table": Place('h = self.P_parts["k"].run(h, ids, slots)', 'm.P_parts["k"]', 'self.P_parts = {"k": P_Part()}'),
    "global": Place("h = P_OBJ.run(h, ids, slots)", "P_OBJ", top=_OBJECT),
    "global_list": Place("for part in P_ALL: h = part.run(h, ids, slots)", "P_ALL[0]", top="P_ALL = [P_Part()]"),
    "getter": Place("h = P_get_part().run(h, ids, slots)", "P_OBJ", top=_OBJECT + "\ndef P_get_part(): return P_OBJ"),
    "cached": Place(
        "h = P_get_part().run(h, ids, slots)",
        "P_get_part()",
        top="@functools.lru_cache(None)\ndef P_get_part(): return P_Part()\nP_get_part()",
    ),
    "imported": Place(
        "import HELPER\nh = HELPER.P_obj.run(h, ids, slots)",
        "HELPER_MODULE.P_obj",
        top="HELPER_MODULE.P_obj = P_Part()",
    ),
    "weak": Place("h = self.P_ref().run(h, ids, slots)", "P_OBJ", "self.P_ref = weakref.ref(P_OBJ)", top=_OBJECT),
    "hook": Place(
        "h = self.P_tap(h)",
        "P_OBJ",
        "self.P_tap = nn.Identity(); self.P_tap.register_forward_hook(P_hooked)",
        top=_OBJECT + "\ndef P_hooked(module, args, out): return P_OBJ.run(out, None, None)",
        needs_rows=False,
    ),
    "method_hook": Place(
        "h = self.P_tap(h)",
        "m.P_obj",
        "self.P_tap, self.P_obj = nn.Identity(), P_Part(); self.P_tap.register_forward_hook(self.P_obj.hooked)",
        members="def hooked(self, module, args, out): return self.run(out, None, None)",
        needs_rows=False,
    ),
    "operator": Place(
        "h = self.P_part @ h",
        "m.P_part",
        "self.P_part = P_Part()",
        members="def __matmul__(self, h): return self.run(h, None, None)",
        needs_rows=False,
    ),
    "closure": Place(
        "h = self.P_run(h, ids, slots)",
        "P_HELD[-1]",
        "self.P_run, part = P_make_part(); P_HELD.append(part)",
        top="P_HELD = []\ndef P_make_part():\n    part = P_Part()\n"
        "    def run(h, ids, slots): return part.run(h, ids, slots)\n    return run, part",
    ),
    "entered": Place(
        "with self.P_part as part: h = part.run(h, ids, slots)",
        "m.P_part",
        "self.P_part = P_Part()",
        members="def __enter__(self): return self\ndef __exit__(self, *_): return None",
    ),
    "property": Place(
        "h = self.P_held.part.run(h, ids, slots)",
        "m.P_held.kept[0]",
        "self.P_held = P_Holder()",
        top="class P_Holder:\n    def __init__(self): self.kept = [P_Part()]\n"
        "    @property\n    def part(self): return self.kept[0]",
    ),
    "threaded": Place(
        "h = P_TL.part.run(h, ids, slots)", "P_TL.part", top="P_TL = threading.local()\nP_TL.part = P_Part()"
    ),
    "partial": Place(
        "h = self.P_run(h, slots=slots)",
        "m.P_run.func.__self__",
        "self.P_run = functools.partial(P_Part().run, ids=None)",
    ),
    "break": Place(
        "h = P_broken(self, h, ids, slots)",
        "m",
        top="@eager_break\ndef P_broken(self, h, ids, slots): return P_run(self, h, ids, slots)",
    ),
}
ON_MODEL = ("inline", "method", "function", "break")
"""Places whose state is the model's own."""
OF_PLACE = (
    "OWNER = copy.deepcopy(OWNER)",
    "def P_run(self, h, ids, slots): return h * $f",
    "P_Part.run = lambda self, h, ids, slots: h * $f",
    "P_Part.forward = lambda self, h, ids, slots: h + $f",
    "OWNER.run = lambda h, ids=None, slots=None: h * $f",
    "type(OWNER).P_run = lambda self, h, ids, slots: h - $f",
)
"""What may happen to a part as such. Lines that do not fit its place do nothing in either twin but raise."""

FORMS = {
    "module": "FN = m",
    "method": "FN = m.forward",
    "function": "def FN(x, ids, slots): return m(x, ids, slots)",
    "lambda": "FN = lambda x, ids, slots: m(x, ids, slots)",
    "closure": "def make(model):\n    def step(x, ids, slots): return model(x, ids, slots)\n"
    "    return step\nFN = make(m)",
    "partial": "FN = functools.partial(m.forward)",
    "engine": "class Engine:\n    def __init__(self, model): self.model, self.calls = model, 0\n"
    "    def __call__(self, x, ids, slots): return self.model(x, ids, slots)\nFN = ENGINE = Engine(m)",
    "engine_step": "class Engine:\n    def __init__(self, model): self.models = [model]\n"
    "    def step(self, x, ids, slots): return self.models[0](x, ids, slots)\nENGINE = Engine(m)\nFN = ENGINE.step",
    "listed": "MODELS, NOW = [m], 0\ndef FN(x, ids, slots): return MODELS[NOW](x, ids, slots)",
    "weak": "REF = weakref.ref(m)\ndef FN(x, ids, slots): return REF()(x, ids, slots)",
    "cached": "@functools.lru_cache(None)\ndef model(): return m\nmodel()\n"
    "def FN(x, ids, slots): return model()(x, ids, slots)",
    "imported": "HELPER_MODULE.model = m\ndef FN(x, ids, slots):\n    from HELPER import model\n"
    "    return model(x, ids, slots)",
    "compiled_text": 'def FN(x, ids, slots): return eval("m")(x, ids, slots)',
}
OTHER = "def OTHER(x, ids, slots): return m(x * 0.5, ids, slots)"
"""Another callable of the same model, as prefill is beside decode."""
OF_FORM = {
    "function": ("m = copy.deepcopy(m)", "def FN_OTHER(x): return x"),
    "engine": ("ENGINE.model = copy.deepcopy(ENGINE.model); m = ENGINE.model",),
    "engine_step": ("ENGINE.models[0] = m = copy.deepcopy(m)", "ENGINE.models = [copy.deepcopy(m)]"),
    "listed": (
        "MODELS[0] = m = copy.deepcopy(m)",
        "MODELS.append(copy.deepcopy(m)); NOW = 1; m = MODELS[1]",
        "NOW = 0; m = MODELS[0]",
    ),
    "weak": ("OLD, m = m, copy.deepcopy(m); REF = weakref.ref(m)",),
    "imported": ("HELPER_MODULE.model = m = copy.deepcopy(m)",),
}
OF_MODEL = (
    "type(m).forward = (lambda old: lambda self, x, ids, slots: old(self, x, ids, slots))(type(m).forward)",
    "m.forward = (lambda old: lambda x, ids, slots: old(x, ids, slots))(m.forward)",
    "m.__dict__.pop('forward', None)",
    "m.unread = $f",
    "m.unread_list = [T($i)]",
    "m.train()",
    "m.eval()",
    "m.register_forward_hook(lambda module, args, out: out)",
    "m._forward_hooks.clear()",
    "m.meta = {'step': $i, 'when': $f}",
    "gc = __import__('gc'); gc.collect()",
)
OUTPUTS = (
    "h",
    "(h, h * 2)",
    "{'a': h, 'b': [h[:, :1], 3, None]}",
    "(h, x)",
    "self.keep(h)",
    "(h, h.reshape(-1, 2))",
    "h.t()",
    "(h, self.out_count)",
)
