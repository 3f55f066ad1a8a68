"""Train a tiny language model on packed text that streams from S3, and resume it in the middle of a text.

The texts are the help topics of Python, as bytes. A checkpoint has the model and the state of the stream; a run that
resumes from it has the losses of the run that was not interrupted.
"""

import argparse
import contextlib
import io
from collections.abc import Iterator
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn

import granular
from granular import testing

BOS, VOCABULARY = 0, 256
LENGTH, BATCH = 129, 16  # inputs and targets have 128 tokens


class Model(nn.Module):
    """A transformer of one layer, in which a token attends to earlier tokens of its own segment."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, VOCABULARY)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        mask = (segments[:, None, :, None] == segments[:, None, None, :]).tril()
        q, k, v = self.attention(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        return self.out(x + self.mlp(x))


@contextlib.contextmanager
def bucket(url: str | None) -> Iterator[granular.Path]:
    """Open the folder of the example. Writes the texts if they are missing."""
    with contextlib.nullcontext({}) if url else testing.s3_server() as options:
        path = granular.Path(url or 's3://examples', **options)
        path.mkdir(exist_ok=True)
        if not (path / 'texts' / 'spec.json').exists():
            with granular.DatasetWriter(path / 'texts', {'text': 'utf8'}, granular.encoders) as writer:
                for text in topics.values():
                    writer.append({'text': text}, flush=False)
        yield path


def tokenize(datapoint: dict) -> dict:
    """Convert a text to tokens, with a first one that packing replaces by the mark of a beginning."""
    return {'tokens': np.frombuffer(b'\0' + datapoint['text'].encode(), np.uint8).astype(np.int64)}


def train(path: granular.Path, steps: int, save_at: int = -1, resume: bool = False) -> list[float]:
    """Train for some steps, from the checkpoint on if there is one to resume from. Returns the losses."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    reader = granular.DatasetReader(path / 'texts', granular.decoders)
    stream = granular.MapDataset.source(reader).shuffle(seed=0).repeat(None).map(tokenize).to_iter_dataset()
    stream = stream.pack({'tokens': LENGTH}, strategy='concat_then_split', bos=BOS).batch(BATCH)
    losses, first = [], 0
    with reader, iter(stream) as batches:
        if resume:
            saved = torch.load(io.BytesIO((path / 'checkpoint').read_bytes()))
            model.load_state_dict(saved['model'])
            optimizer.load_state_dict(saved['optimizer'])
            batches.load_state_dict(saved['stream'])
            first = saved['step']
        for step in range(first, steps):
            batch = {key: torch.from_numpy(array).long() for key, array in next(batches).items()}
            tokens, positions, segments = batch['tokens'], batch['tokens_positions'], batch['tokens_segment_ids']
            targets = tokens[:, 1:].masked_fill(segments[:, 1:] != segments[:, :-1], -100)  # no targets of other texts
            scores = model(tokens[:, :-1], positions[:, :-1], segments[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step + 1 == save_at:
                file, state = io.BytesIO(), {'step': step + 1, 'stream': batches.state_dict()}
                torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(), **state}, file)
                (path / 'checkpoint').write_bytes(file.getvalue())  # one file: model and stream are of the same step
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--url', help='a folder in any store (default: an S3 server that this program starts)')
    parser.add_argument('--steps', type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)  # more only slow down a model this small
    with bucket(args.url) as path:
        losses = train(path, args.steps, save_at=args.steps // 2)
        print(f'{args.steps} steps: loss {losses[0]:.3f} in the first, {losses[-1]:.3f} in the last')
        resumed = train(path, args.steps, resume=True)
        same = sum(a == b for a, b in zip(losses[-len(resumed) :], resumed, strict=True))
        print(f'resumed at step {args.steps - len(resumed)}: {same} of {len(resumed)} losses are the same')


if __name__ == '__main__':
    main()
