"""Real users of torch's attention, unchanged, on lazymax: transformers' and diffusers' blocks of small random weights.

Each model runs three times: in float64 and in its own precision on torch's function, and in its own precision under
`replace_sdpa`. The output must lie in the error budget, and every attention call must have been a kernel's.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lazymax
from lazymax.testing import EPS, within_budget

LAYERS = 2
DTYPES = (torch.float32, torch.bfloat16)
Run = Callable[[torch.nn.Module], torch.Tensor]


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    yield
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def assert_same(model: torch.nn.Module, run: Run, calls: int, compiled: Any = None) -> torch.Tensor:
    """Compare, count, and return what the model gave under `replace_sdpa`. compiled: the model by torch.compile."""
    with torch.no_grad():
        exact, low = run(copy.deepcopy(model).double()), run(model)
        with lazymax.replace_sdpa() as sdpa:
            out = run(model if compiled is None else compiled)
    assert (sdpa.kernel_calls, sdpa.torch_calls) == (calls, 0)
    budget = within_budget(out, exact, low, eps=EPS[out.dtype])
    assert budget.ok, str(budget)
    return out


def cast(model: torch.nn.Module, *tensors: torch.Tensor) -> list[torch.Tensor]:
    dtype = next(model.parameters()).dtype
    return [t.to(dtype) for t in tensors]


# transformers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def llama(device: str) -> Callable[[torch.dtype], Any]:
    """A decoder with grouped heads: 4 query heads over 2 key heads."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install 'lazymax[consumers]'"
    )
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="sdpa", initializer_range=0.2,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip

    def make(dtype: torch.dtype) -> Any:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval().to(device, dtype)
        assert model.config._attn_implementation == "sdpa"
        return model

    return make


def prompt(device: str, padding: int) -> dict[str, torch.Tensor]:
    """Two rows of 7 tokens; the first begins with `padding` tokens of padding."""
    tokens = torch.randint(1, 97, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    tokens[0, :padding] = 0
    mask[0, :padding] = 0
    return dict(input_ids=tokens.to(device), attention_mask=mask.to(device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", (0, 3), ids=("causal", "padded"))
def test_llama_prefill(padding: int, dtype: torch.dtype, llama: Any, device: str) -> None:
    inputs = prompt(device, padding)
    seen = inputs["attention_mask"].bool()
    assert_same(llama(dtype), lambda model: model(**inputs, use_cache=False).logits[seen], calls=LAYERS)


@pytest.mark.parametrize("padding", (0, 3), ids=("causal", "padded"))
def test_llama_generates_the_same_tokens(padding: int, llama: Any, device: str) -> None:
    """Prefill, then one query over a growing cache."""
    model, inputs, new = llama(torch.float32), prompt(device, padding), 4
    tokens = []

    def run(model: Any) -> torch.Tensor:
        found = model.generate(
            **inputs, max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        tokens.append(found.sequences)
        return torch.stack(found.logits, 1)

    assert_same(model, run, calls=LAYERS * new)
    exact, torchs, ours = tokens
    assert ours.shape == (2, 7 + new) and torch.equal(ours, torchs) and torch.equal(ours, exact)


def test_llama_compiled(llama: Any, device: str) -> None:
    model, inputs = llama(torch.float32), prompt(device, 3)
    seen = inputs["attention_mask"].bool()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(model, lambda model: model(**inputs, use_cache=False).logits[seen], LAYERS, compiled)


def test_llama_trains(llama: Any, device: str) -> None:
    """Loss and gradients of a step."""
    inputs = prompt(device, 3)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)

    def step(model: Any) -> dict[str, torch.Tensor]:
        loss = model(**inputs, labels=labels, use_cache=False).loss
        loss.backward()
        return {"loss": loss.detach()[None], **{name: p.grad for name, p in model.named_parameters()}}

    exact, torchs = step(llama(torch.float32).double()), step(llama(torch.float32))
    with lazymax.replace_sdpa() as sdpa:
        ours = step(llama(torch.float32))
    assert (sdpa.kernel_calls, sdpa.torch_calls) == (LAYERS, 0)
    for name, value in ours.items():
        budget = within_budget(value, exact[name], torchs[name], eps=4 * EPS[value.dtype], what=name)
        assert budget.ok, str(budget)


# diffusers ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A transformer block of diffusers, and the attention calls of one pass."""

    id: str
    make: Callable[[], torch.nn.Module]
    run: Callable[[torch.nn.Module, str], torch.Tensor]
    calls: int


def noise(seed: int, *size: int, device: str) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(device)


def basic() -> torch.nn.Module:
    """Self-attention, cross-attention to text, feed-forward: the block of Stable Diffusion's UNet."""
    from diffusers.models.attention import BasicTransformerBlock

    return BasicTransformerBlock(dim=64, num_attention_heads=2, attention_head_dim=32, cross_attention_dim=48)


def run_basic(block: torch.nn.Module, device: str) -> torch.Tensor:
    x, text = cast(block, noise(1, 2, 9, 64, device=device), noise(2, 2, 5, 48, device=device))
    return block(x, encoder_hidden_states=text)


def run_basic_masked(block: torch.nn.Module, device: str) -> torch.Tensor:
    """The text is padded: an added mask (B, 1, Sk), as the UNet makes it."""
    x, text = cast(block, noise(1, 2, 9, 64, device=device), noise(2, 2, 5, 48, device=device))
    kept = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], device=device)
    bias = ((1 - kept) * -10000.0)[:, None].to(x.dtype)
    return block(x, encoder_hidden_states=text, encoder_attention_mask=bias)


def flux() -> torch.nn.Module:
    """One attention over text and image tokens, with rotary positions, stored as (batch, length, heads, head dim)."""
    from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

    return FluxTransformerBlock(dim=64, num_attention_heads=2, attention_head_dim=32)


def run_flux(block: torch.nn.Module, device: str) -> torch.Tensor:
    image, text, time = cast(
        block, noise(1, 2, 9, 64, device=device), noise(2, 2, 5, 64, device=device), noise(3, 2, 64, device=device)
    )
    angles = noise(4, 14, 16, device=device).repeat_interleave(2, -1)
    text_out, image_out = block(
        hidden_states=image,
        encoder_hidden_states=text,
        temb=time,
        image_rotary_emb=(angles.cos().to(image.dtype), angles.sin().to(image.dtype)),
    )
    return torch.cat((text_out, image_out), 1)


BLOCKS = (
    Block("basic", basic, run_basic, calls=2),
    Block("basic, padded text", basic, run_basic_masked, calls=2),
    Block("flux", flux, run_flux, calls=1),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", BLOCKS, ids=lambda case: case.id)
def test_diffusers_block(case: Block, dtype: torch.dtype, device: str) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed: pip install 'lazymax[consumers]'")
    torch.manual_seed(0)
    block = case.make().eval().to(device, dtype)
    assert_same(block, lambda block: case.run(block, device), case.calls)
