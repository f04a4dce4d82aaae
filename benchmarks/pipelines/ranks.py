"""Two ranks under ddp: a slow one, uneven batches, many small collectives, and none of these."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Sampler

from pipelines import Parts, Pipeline
from pipelines.models import Gpt, TextModule, tokens

TWO = {"hardware.strategy": "ddp", "hardware.devices": 2}
OWN_SAMPLER = {"use_distributed_sampler": False}


class Curious(Gpt):
    """Rank 0 looks at its tokens for a report."""

    every = 1

    def training_step(self, batch, batch_idx):
        if self.global_rank == 0 and batch_idx % self.every == 0:
            seen = {}
            for _ in range(300):
                for token in batch["input_ids"].flatten().tolist():
                    seen[token] = seen.get(token, 0) + 1
        return super().training_step(batch, batch_idx)


class Incurious(Curious):
    every = 1000


class Talkative(Gpt):
    """Averages a metric of each position over the ranks, in every step."""

    synced = True

    def training_step(self, batch, batch_idx):
        out = self.gpt(input_ids=batch["input_ids"], labels=batch["input_ids"])
        for position in range(64):
            value = out.logits[:, position].detach().mean()
            self.log(f"logit_{position}", value, on_step=True, on_epoch=False, sync_dist=self.synced)
        return out.loss


class Silent(Talkative):
    synced = False


class ByLength(Sampler):
    """Long texts to the second rank, short ones to the first: sorted, and cut in two."""

    def __init__(self, count, mixed):
        self.count, self.mixed = count, mixed

    def __iter__(self):
        import torch.distributed as dist

        rank, half = dist.get_rank(), self.count // 2
        if self.mixed:  # blocks of 16 texts, short and long in turn, shared by both ranks
            blocks = [(block % 2) * half + (block // 2) * 16 for block in range(self.count // 16)]
            return (start + 2 * place + rank for start in blocks for place in range(8))
        return iter(range(rank * half, rank * half + half))

    def __len__(self):
        return self.count // 2


class Texts(TextModule):
    """Texts of 16 to 112 tokens; a batch is as long as its longest."""

    mixed = False

    def setup(self, stage):
        ids = tokens(1024, 112)
        # within each half of the index lengths differ little, between the halves they do
        self.train = [{"input_ids": ids[i, : (16 if i < 512 else 96) + i % 16]} for i in range(1024)]

    def train_dataloader(self):
        return DataLoader(
            self.train, batch_size=self.batch_size, sampler=ByLength(len(self.train), self.mixed), collate_fn=self.pad
        )

    def val_dataloader(self):
        return []

    def pad(self, rows):
        texts = [row["input_ids"] for row in rows]
        return {"input_ids": torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)}


class MixedTexts(Texts):
    """In every step both ranks have texts of the same lengths."""

    mixed = True


def pipelines(folder):
    yield Pipeline(
        name="rank 0 reports", planted="stragglers", parts=Parts(module=Curious, data=TextModule, config=TWO),
        cure=Parts(module=Incurious, data=TextModule, config=TWO),
    )  # fmt: skip
    yield Pipeline(
        name="long texts to rank 1", planted="uneven batches", kind="kept aside",
        parts=Parts(module=Gpt, data=Texts, config=TWO, flags=OWN_SAMPLER),
        cure=Parts(module=Gpt, data=MixedTexts, config=TWO, flags=OWN_SAMPLER),
    )  # fmt: skip
    yield Pipeline(
        name="64 metrics averaged in a step", planted="small collectives", also=("many tiny operations",),
        parts=Parts(module=Talkative, data=TextModule, config=TWO),
        cure=Parts(module=Silent, data=TextModule, config=TWO),
    )  # fmt: skip
    yield Pipeline(
        name="GPT-2 on two ranks", kind="kept aside",
        parts=Parts(module=lambda: Gpt(2, 96), data=TextModule, config=TWO),
    )  # fmt: skip
