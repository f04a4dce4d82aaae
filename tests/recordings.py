"""Small recordings, made by hand or drawn by hypothesis, for tests of what is computed from them."""

import numpy as np
from hypothesis import strategies as st

from kit.memory.replay.replay import CATEGORIES, PHASES, Recording

MIB = 1 << 20


class RecordingBuilder:
    """Writes a recording down as a story: operators run, blocks come and go.

    `build()` gives the recording; blocks are numbered in the order of their creation.
    """

    def __init__(self, rounding_bytes=512, batch_size=1, **facts):
        self.rounding_bytes, self.batch_size = rounding_bytes, batch_size
        self.facts = {"device_kind": "cuda" if rounding_bytes > 1 else "cpu", **facts}
        self.names, self.blocks, self.events, self.operators, self.batch_starts = [], [], [], [], []
        self.phase, self.module = "setup", ""

    def name(self, text):
        if text not in self.names:
            self.names.append(text)
        return self.names.index(text)

    def operator(self, name, phase=None, module=None):
        """The next operator runs; later blocks are its own."""
        self.phase = self.phase if phase is None else phase
        self.module = self.module if module is None else module
        self.operators.append((self.name(name), self.name(self.module), PHASES.index(self.phase)))

    def batch(self):
        """A micro-batch begins with the next operator."""
        self.batch_starts.append(len(self.operators))

    def allocate(self, size_bytes, category="temporaries", stream=0):
        """Returns the block's number."""
        if not self.operators:
            self.operator("empty")
        operator, module, phase = self.operators[-1]
        self.blocks.append((size_bytes, CATEGORIES.index(category), operator, module, phase, stream))
        self.events.append((len(self.blocks) - 1, True, len(self.operators) - 1))
        return len(self.blocks) - 1

    def free(self, *blocks):
        self.events += [(block, False, len(self.operators) - 1) for block in blocks]

    def build(self):
        def columns(rows, *kinds):
            table = list(zip(*rows, strict=True)) or [()] * len(kinds)
            return [np.array(column, dtype=kind) for column, kind in zip(table, kinds, strict=True)]

        sizes, categories, operators, modules, phases, streams = columns(
            self.blocks, np.int64, np.uint8, np.int32, np.int32, np.uint8, np.uint8
        )
        event_block, event_allocates, event_time = columns(self.events, np.int32, np.bool_, np.int32)
        operator_name, operator_module, operator_phase = columns(self.operators, np.int32, np.int32, np.uint8)
        return Recording(
            block_bytes=sizes, block_category=categories, block_operator=operators, block_module=modules,
            block_phase=phases, block_stream=streams, event_block=event_block, event_allocates=event_allocates,
            event_time=event_time, operator_name=operator_name, operator_module=operator_module,
            operator_phase=operator_phase, names=tuple(self.names), batch_starts=tuple(self.batch_starts),
            batch_size=self.batch_size, rounding_bytes=self.rounding_bytes, facts=self.facts,
        )  # fmt: skip


def training_recording(batch_size=4, layers=12, width_bytes=1 << 20, steps=2, rounding_bytes=512, **facts):
    """Two steps of a layered model: parameters, activations that grow with the batch, gradients, optimizer state."""
    story = RecordingBuilder(rounding_bytes, batch_size, parameters=layers * width_bytes // 4, **facts)
    story.operator("empty", "setup")
    for layer in range(layers):
        story.module = f"layer{layer}"
        story.allocate(width_bytes + 8 * layer, "parameters")
    gradients, states = [], []
    for _ in range(steps):
        story.batch()
        story.operator("copy", "forward", "")
        inputs = story.allocate(batch_size * 4096, "inputs")
        activations = []
        for layer in range(layers):
            story.operator("addmm", "forward", f"layer{layer}")
            activations.append(story.allocate(batch_size * (width_bytes // 8 + 100), "activations"))
            scratch = story.allocate(batch_size * 1000 + 24, "temporaries")
            story.operator("gelu", "forward")
            activations.append(story.allocate(batch_size * (width_bytes // 2), "activations"))
            story.free(scratch)
        story.free(*gradients)
        gradients = []
        for layer in reversed(range(layers)):
            story.operator("mm", "backward", f"layer{layer}")
            flow = story.allocate(batch_size * (width_bytes // 2), "temporaries")
            gradients.append(story.allocate(width_bytes + 8 * layer, "gradients"))
            story.free(flow, activations.pop(), activations.pop())
        story.operator("_foreach_add", "optimizer", "")
        if not states:
            sizes = [width_bytes + 8 * layer for layer in range(layers) for _ in "mv"]
            states = [story.allocate(size, "optimizer_state") for size in sizes]
        scratch = [story.allocate(width_bytes + 8 * layer) for layer in range(layers)]
        story.free(*scratch, inputs)
    return story.build()


CATEGORY_CYCLE = ("parameters", "activations", "gradients", "temporaries", "workspace")


def told(actions, batch_size=1, rounding_bytes=512, **facts):
    """A recording from (kind, number, number, stream) tuples, such as hypothesis draws.

    `allocate` takes fixed bytes and bytes per sample, `free` a place among those alive, `operator` a name and a phase.
    """
    story = RecordingBuilder(rounding_bytes, batch_size, **facts)
    story.operator("empty", "setup")
    alive = []
    for count, (kind, first, second, stream) in enumerate(actions):
        if kind == "allocate":
            category = CATEGORY_CYCLE[count % len(CATEGORY_CYCLE)]
            alive.append(story.allocate(first + second * batch_size, category, stream))
        elif kind == "free" and alive:
            story.free(alive.pop(first % len(alive)))
        elif kind == "operator":
            if first % 7 == 0:
                story.batch()
            story.operator(("mm", "gelu", "addmm")[first % 3], PHASES[1 + second % 3], f"layer{first % 4}")
    return story.build()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("allocate"),
            st.one_of(st.integers(0, 4096), st.integers(0, 30 * MIB)),
            st.one_of(st.just(0), st.integers(0, 3 * MIB)),
            st.sampled_from([0, 0, 0, 1]),
        ),
        st.tuples(st.just("free"), st.integers(0, 50), st.just(0), st.just(0)),
        st.tuples(st.just("operator"), st.integers(0, 50), st.integers(0, 2), st.just(0)),
    ),
    max_size=80,
)
"""What `told` makes a recording of."""
