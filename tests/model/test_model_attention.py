"""Attention within documents by every kernel against its definition, and which kernel runs where."""

import itertools

import pytest
import torch
from torch import Tensor

from llm_pretrain.config.model_config import ModelConfig
from llm_pretrain.model.decoder import Decoder
from llm_pretrain.model.kernels import attention
from llm_pretrain.model.kernels import choice as kernels
from llm_pretrain.model.kernels.attention import DocumentLayout, document_attention, document_layout
from llm_pretrain.model.kernels.choice import Kernels, attention_implementation
from llm_pretrain.training.model_setup import initialize_weights

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LENGTHS = [1, 63, 64, 65, 7, 200, 600]
"""Below, at and above the size of a block; the last is too long for its probabilities to be kept."""


def tensors(length: int, rows: int = 1, heads: tuple[int, int] = (4, 2)) -> tuple[Tensor, Tensor, Tensor]:
    """query [rows, length, 4, 8], key and value [rows, length, 2, 8] in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, length, count, 8) for count in (heads[0], heads[1], heads[1])]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return tuple(each.requires_grad_() for each in made)


def offsets_of(lengths: list[int], repeats: int = 1) -> Tensor:
    total = list(itertools.accumulate(lengths, initial=0))
    return torch.tensor(total + total[-1:] * (repeats - 1), dtype=torch.int32)


def ids_of(lengths: list[int]) -> Tensor:
    return torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]


def by_definition(query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor) -> Tensor:
    """Softmax of all scores but those that are masked."""
    groups = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)
    scores = torch.einsum("bqnd,bknd->bnqk", query, key) / query.shape[-1] ** 0.5
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    visible = same & torch.ones(scores.shape[-2:]).bool().tril()
    return torch.einsum("bnqk,bknd->bqnd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


def outcome(out: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The result, and gradients for a fixed direction."""
    direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return [out, *torch.autograd.grad(out, inputs, direction)]


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)])
def test_blocks_of_queries_are_the_definition(heads):
    inputs = tensors(sum(LENGTHS), heads=heads)
    layout = DocumentLayout(offsets=offsets_of(LENGTHS, repeats=3))
    assert attention._use_blocks(torch.float64, sum(LENGTHS) / len(LENGTHS), 0.0)
    ours = outcome(document_attention(*inputs, layout, 0.0), inputs)
    theirs = outcome(by_definition(*inputs, ids_of(LENGTHS)), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-11)


CHUNKS = [(0, 48), (48, 144), (144, 192)]


def parts_of(kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """All positions by `kernel`, a chunk at a time."""
    return torch.cat([kernel(query[:, a:b], key, value, (a, b)) for a, b in CHUNKS], 1)


@pytest.mark.parametrize("layout", ["offsets", "mask", "one document"])
def test_some_of_the_positions_attend_as_all_of_them_do(layout):
    """In one process's order of sums: the same bits."""
    ids = torch.cat([ids_of([100, 3, 89]), ids_of([192])])
    inputs = tuple(each.detach().float().requires_grad_() for each in tensors(192, rows=2))
    same = ids[:, None, :, None] == ids[:, None, None, :]
    layouts = {
        "offsets": document_layout(ids),
        "mask": DocumentLayout(mask=same & torch.ones(192, 192, dtype=torch.bool).tril()),
        "one document": DocumentLayout(),
    }
    edges = [0, 192, 384] if layout == "one document" else [0, 100, 103, 192, 384]
    whole = attention.block_attention(*(x.flatten(0, 1) for x in inputs), edges).view(inputs[0].shape)

    def part(query: Tensor, key: Tensor, value: Tensor, chunk: tuple[int, int]) -> Tensor:
        return attention.part_attention(query, key, value, layouts[layout], [chunk])

    found, expected = outcome(parts_of(part, *inputs), inputs), outcome(whole, inputs)
    assert layout == "mask" or torch.equal(found[0], expected[0])
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    own = torch.cat([torch.arange(*chunk) for chunk in (CHUNKS[0], CHUNKS[2])])
    both = attention.part_attention(inputs[0][:, own], *inputs[1:], layouts[layout], [CHUNKS[0], CHUNKS[2]])
    torch.testing.assert_close(both, whole[:, own])


@pytest.mark.parametrize("length", [40, 200, 600])
def test_rows_without_documents_are_the_definition(length):
    inputs = tensors(length, rows=2)
    ours = outcome(document_attention(*inputs, DocumentLayout(), 0.0), inputs)
    theirs = outcome(by_definition(*inputs, torch.zeros(2, length)), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-11)


def test_low_precision_has_scores_in_fp32():
    """Queries and keys come in fp32 under autocast; scores rounded to bf16 would be off by 2 to 3 times."""
    exact = [each.detach() * factor for each, factor in zip(tensors(300), (4, 1, 1), strict=True)]
    query, key, value = exact[0].float(), exact[1].float(), exact[2].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        low = document_attention(query, key, value, DocumentLayout(), 0.0)
        rounded = document_attention(query.bfloat16(), key.bfloat16(), value, DocumentLayout(), 0.0)
    expected = by_definition(exact[0], exact[1], value.double(), torch.zeros(1, 300))
    errors = [float((each.double() - expected).norm() / expected.norm()) for each in (low, rounded)]
    assert low.dtype == torch.bfloat16
    assert errors[0] < 4e-3 < errors[1]


def test_nothing_is_kept_without_gradients():
    query, key, value = tensors(200)
    with torch.no_grad():
        out = document_attention(query, key, value, DocumentLayout(), 0.0)
    assert out.grad_fn is None
    expected = document_attention(query, key, value, DocumentLayout(), 0.0)
    assert torch.equal(out, expected)


CONFIG = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.15,
)
IDS = torch.randint(0, 96, (2, 300), generator=torch.Generator().manual_seed(1))
DOCUMENTS = torch.cat([ids_of([120, 180]), ids_of([5, 200, 95])])
OFFSETS = offsets_of([120, 180, 5, 200, 95], repeats=60)


def make(**kernels) -> Decoder:
    model = Decoder(CONFIG, kernels=Kernels(**kernels))
    initialize_weights(model, 0)
    return model.double()


def test_offsets_say_the_same_as_document_ids():
    model = make()
    by_ids, by_offsets = (
        model(IDS, document_ids=DOCUMENTS, document_offsets=offsets).logits for offsets in (None, OFFSETS)
    )
    assert torch.equal(by_ids, by_offsets)
    assert not torch.allclose(by_ids, model(IDS).logits)


def loop_of_documents(seen: list):
    """`varlen_attn` as torch documents it, document by document."""

    def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa=True):
        assert query.shape[0] == int(cu_seq_q[-1])
        assert key.shape[0] == int(cu_seq_k[-1])
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert max_q >= int(cu_seq_q.diff().max())
        assert max_k >= int(cu_seq_k.diff().max())
        assert window_size == (-1, 0)
        seen.append((len(cu_seq_q), key.shape[1]))
        groups = query.shape[1] // key.shape[1]
        assert enable_gqa or groups == 1
        parts = []
        pieces = zip(*(itertools.pairwise(each.tolist()) for each in (cu_seq_q, cu_seq_k)), strict=True)
        for (a, b), (c, d) in pieces:
            if b > a:  # the queries are those of the last keys
                queries = torch.cat([query.new_zeros(d - c - (b - a), *query.shape[1:]), query[a:b]])
                out = by_definition(queries[None], key[None, c:d], value[None, c:d], torch.zeros(1, d - c))
                parts.append(out[0, a - b :])
        return torch.cat(parts)

    return kernel, {"window_size": (-1, 0), "enable_gqa": True}


@pytest.mark.parametrize("is_told", [True, False], ids=["enable_gqa", "torch 2.11"])
def test_varlen_gets_documents_and_each_key_once(monkeypatch, is_told):
    seen: list[tuple[int, int]] = []
    inputs = tensors(300, rows=2)
    expected = outcome(by_definition(*inputs, DOCUMENTS), inputs)
    kernel, options = loop_of_documents(seen)
    if not is_told:
        del options["enable_gqa"]
    monkeypatch.setattr(attention, "varlen_kernel", lambda: (kernel, options))
    ours = outcome(attention._varlen(*inputs, OFFSETS), inputs)
    assert inputs[1].shape[2] < inputs[0].shape[2]
    assert seen == [(len(OFFSETS), inputs[1].shape[2])]
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-11)


def test_varlen_computes_a_chunk_of_the_positions(monkeypatch):
    inputs = tensors(192, rows=2)
    ids = torch.cat([ids_of([100, 3, 89]), ids_of([192])])
    offsets = torch.tensor([0, 100, 103, 192, 384, 384, 384, 384], dtype=torch.int32)
    monkeypatch.setattr(attention, "varlen_kernel", lambda: loop_of_documents([]))
    ours = outcome(
        parts_of(lambda q, k, v, chunk: attention._varlen(q, k, v, offsets, chunk), *inputs), inputs
    )
    for mine, other in zip(ours, outcome(by_definition(*inputs, ids), inputs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-11)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pieces_without_queries_have_gradients_of_zero_on_a_gpu():
    """Flash attention's own, in bf16."""
    inputs = tuple(each.detach().cuda().bfloat16().requires_grad_() for each in tensors(192, 2, (4, 2)))
    offsets = torch.tensor([0, 100, 103, 192, 384, 384, 384], dtype=torch.int32, device="cuda")
    whole = outcome(attention._varlen(*inputs, offsets), inputs)
    parts = parts_of(lambda q, k, v, chunk: attention._varlen(q, k, v, offsets, chunk), *inputs)
    for mine, other in zip(outcome(parts, inputs), whole, strict=True):
        torch.testing.assert_close(mine, other, rtol=2**-6, atol=2**-6)


def test_varlen_is_asked_for_causal_attention_in_the_words_of_the_installed_torch():
    import inspect

    kernel, options = attention.varlen_kernel()
    assert options.keys() <= inspect.signature(kernel).parameters.keys()
    assert options["window_size"] == (-1, 0)


def test_the_choice_depends_on_device_type_and_shape_alone(monkeypatch):
    bf16, fp32 = torch.bfloat16, torch.float32
    monkeypatch.setattr(kernels, "_capability", lambda _: (9, 0))

    def choice(device=CUDA, dtype=bf16, head_dim=64, dropout=0.0, **kernels):
        return attention_implementation(Kernels(**kernels), device, dtype, head_dim, dropout)

    assert choice() == choice(dtype=torch.float16) == "varlen"
    assert choice(device=CPU) == choice(dtype=fp32) == choice(head_dim=257) == choice(dropout=0.1) == "sdpa"
    assert choice(head_dim=100) == "sdpa"
    assert [choice(attention=name) for name in ("sdpa", "varlen")] == ["sdpa", "varlen"]
    torch.use_deterministic_algorithms(True)
    try:
        assert choice() == "sdpa"
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(kernels, "_capability", lambda _: (7, 5))
    assert choice() == "sdpa"


def test_without_offsets_a_gpu_gets_a_mask():
    layout = document_layout(DOCUMENTS.to("meta"), implementation="varlen")
    assert layout.mask is not None
    with_offsets = document_layout(DOCUMENTS.to("meta"), OFFSETS, "varlen")
    assert with_offsets.offsets is OFFSETS
