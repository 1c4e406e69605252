"""The programs. Each is made by a function that imports its library; nothing is downloaded.

A program is a callable, the dimension of each argument that is the batch, and a maker of batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PROGRAMS", "Program"]


@dataclass
class Program:
    """What is called, and with what: ``batch`` makes the arguments for so many rows."""

    fn: Callable[..., Any]
    dynamic: dict[str, Any]
    batch: Callable[[int], tuple[Any, ...]]
    max_size: int = 16
    settings: dict[str, Any] = field(default_factory=dict)


PROGRAMS: dict[str, Callable[[], Program]] = {}
"""The makers, by ``library/program``."""


def program(name: str) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    """Enter a maker under a name."""

    def enter(make: Callable[[], Program]) -> Callable[[], Program]:
        PROGRAMS[name] = make
        return make

    return enter


def _normal(*shape: int) -> Callable[[int], tuple[Any, ...]]:
    return lambda rows: (torch.randn(rows, *shape),)


def _ids(length: int, size: int = 100) -> Callable[[int], tuple[Any, ...]]:
    return lambda rows: (torch.randint(1, size, (rows, length)),)


def _masked(length: int, size: int = 100) -> Callable[[int], tuple[Any, ...]]:
    def batch(rows: int) -> tuple[Any, ...]:
        mask = (torch.arange(length) < torch.randint(1, length + 1, (rows, 1))).long()
        return torch.randint(1, size, (rows, length)) * mask, mask

    return batch


def _of(module: nn.Module, batch: Callable[[int], tuple[Any, ...]], name: str, **settings: Any) -> Program:
    return Program(module.eval(), {name: 0}, batch, settings=settings)


# transformers


def _small(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {**sizes, "vocab_size": 100, **more}


@program("transformers/BERT, masked")
def _() -> Program:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(**_small())).eval()

    def embed(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[..., None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)

    return Program(embed, {"input_ids": 0, "attention_mask": 0}, _masked(16))


@program("transformers/DistilBERT classifier")
def _() -> Program:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(dim=32, hidden_dim=64, n_layers=2, n_heads=2, vocab_size=100)
    model = DistilBertForSequenceClassification(config).eval()
    return Program(lambda input_ids: model(input_ids).logits, {"input_ids": 0}, _ids(16))


@program("transformers/GPT2 logits")
def _() -> Program:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=64)).eval()
    return Program(lambda input_ids: model(input_ids, use_cache=False).logits, {"input_ids": 0}, _ids(12))


@program("transformers/Llama logits")
def _() -> Program:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**_small(num_key_value_heads=1))).eval()
    return Program(lambda input_ids: model(input_ids, use_cache=False).logits, {"input_ids": 0}, _ids(12))


@program("transformers/ViT")
def _() -> Program:
    from transformers import ViTConfig, ViTModel

    sizes = _small(image_size=32, patch_size=8)
    del sizes["vocab_size"]
    model = ViTModel(ViTConfig(**sizes)).eval()
    return Program(lambda pixels: model(pixels).last_hidden_state, {"pixels": 0}, _normal(3, 32, 32))


@program("transformers/T5 encoder")
def _() -> Program:
    from transformers import T5Config, T5EncoderModel

    model = T5EncoderModel(T5Config(vocab_size=100, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)).eval()
    return Program(lambda ids: model(ids).last_hidden_state, {"ids": 0}, _ids(12))


@program("transformers/Wav2Vec2")
def _() -> Program:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    sizes = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    convolved = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    model = Wav2Vec2Model(Wav2Vec2Config(**_small(**sizes, **convolved))).eval()
    return Program(lambda sound: model(sound).last_hidden_state, {"sound": 0}, _normal(800))


# timm, torchvision


def _timm(name: str, **settings: Any) -> Program:
    import timm

    return _of(timm.create_model(name, num_classes=10, **settings), _normal(3, 32, 32), "x")


@program("timm/ResNet")
def _() -> Program:
    return _timm("resnet10t")


@program("timm/ViT")
def _() -> Program:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 4}
    return _timm("vit_tiny_patch16_224", **sizes)


@program("timm/ConvNeXt")
def _() -> Program:
    return _timm("convnext_atto", depths=(1, 1, 2, 1), dims=(16, 32, 48, 64))


@program("torchvision/MobileNet")
def _() -> Program:
    from torchvision.models import mobilenet_v3_small

    return _of(mobilenet_v3_small(num_classes=10), _normal(3, 32, 32), "x")


@program("torchvision/Swin")
def _() -> Program:
    from torchvision.models import SwinTransformer

    sizes: dict[str, Any] = {"patch_size": [2, 2], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2]}
    return _of(SwinTransformer(**sizes, window_size=[4, 4], num_classes=10), _normal(3, 32, 32), "x")


@program("torchvision/LRASPP")
def _() -> Program:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5)
    return _of(model, _normal(3, 32, 32), "input")


# lucidrains


@program("vit-pytorch/ViT")
def _() -> Program:
    from vit_pytorch import ViT

    sizes = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 64}
    return _of(ViT(**sizes), _normal(3, 32, 32), "img")


@program("vit-pytorch/CCT")
def _() -> Program:
    from vit_pytorch.cct import CCT

    sizes: dict[str, Any] = {"img_size": 32, "embedding_dim": 32, "n_conv_layers": 1, "num_layers": 2, "num_heads": 2}
    return _of(CCT(**sizes, mlp_ratio=2, num_classes=10, kernel_size=7, stride=2, padding=3), _normal(3, 32, 32), "x")


@program("x-transformers/decoder")
def _() -> Program:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2, rotary_pos_emb=True)
    return _of(TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers), _ids(12), "x")


@program("x-transformers/encoder of numbers")
def _() -> Program:
    from x_transformers import ContinuousTransformerWrapper, Encoder

    layers = Encoder(dim=32, depth=2, heads=2, ff_glu=True)
    model = ContinuousTransformerWrapper(dim_in=8, dim_out=8, max_seq_len=32, attn_layers=layers)
    return _of(model, _normal(12, 8), "x")


@program("vector-quantize-pytorch/FSQ")
def _() -> Program:
    from vector_quantize_pytorch import FSQ

    return _of(nn.Sequential(nn.Linear(16, 16), FSQ([8, 5, 5], dim=16)), _normal(8, 16), "input")


@program("vector-quantize-pytorch/VectorQuantize")
def _() -> Program:
    from vector_quantize_pytorch import VectorQuantize

    return _of(VectorQuantize(dim=16, codebook_size=32), _normal(8, 16), "x")


@program("local-attention/transformer")
def _() -> Program:
    from local_attention import LocalTransformer

    sizes = {"num_tokens": 100, "dim": 32, "depth": 2, "max_seq_len": 32, "local_attn_window_size": 8, "heads": 2}
    return _of(LocalTransformer(**sizes, causal=True, dim_head=16), _ids(16), "x")


@program("denoising-diffusion-pytorch/U-Net")
def _() -> Program:
    from denoising_diffusion_pytorch import Unet

    model = Unet(dim=8, dim_mults=(1, 2), flash_attn=False).eval()
    noisy = lambda rows: (torch.randn(rows, 3, 16, 16), torch.randint(0, 100, (rows,)))  # noqa: E731
    return Program(model, {"x": 0, "time": 0}, noisy, 8)


# adapters, diffusion, encoders of sentences


@program("PEFT/LoRA on GPT2")
def _() -> Program:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    base = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, fan_in_fan_out=True)).eval()
    return Program(lambda ids: model(input_ids=ids, use_cache=False).logits, {"ids": 0}, _ids(12))


@program("PEFT/prefix tuning on GPT2")
def _() -> Program:
    from peft import PrefixTuningConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    base = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    model = get_peft_model(base, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    ask = lambda ids, mask: model(input_ids=ids, attention_mask=mask, use_cache=False).logits  # noqa: E731
    batch = lambda rows: (torch.randint(1, 100, (rows, 12)), torch.ones(rows, 12, dtype=torch.long))  # noqa: E731
    return Program(ask, {"ids": 0, "mask": 0}, batch, 8)


@program("diffusers/U-Net")
def _() -> Program:
    from diffusers import UNet2DModel

    blocks: dict[str, Any] = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
    blocks |= {"up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "block_out_channels": (16, 32)}
    model = UNet2DModel(sample_size=16, layers_per_block=1, norm_num_groups=8, **blocks).eval()
    noisy = lambda rows: (torch.randn(rows, 3, 16, 16), torch.randint(0, 100, (rows,)))  # noqa: E731
    step = lambda sample, timestep: model(sample, timestep, return_dict=False)[0]  # noqa: E731
    return Program(step, {"sample": 0, "timestep": 0}, noisy, 8)


@program("diffusers/VAE decoder")
def _() -> Program:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(block_out_channels=(16, 16), norm_num_groups=8, latent_channels=4).eval()
    return Program(lambda latents: model.decode(latents, return_dict=False)[0], {"latents": 0}, _normal(4, 8, 8), 8)


@program("sentence-transformers/pooling")
def _() -> Program:
    from sentence_transformers.models import Normalize, Pooling
    from transformers import MPNetConfig, MPNetModel

    model = MPNetModel(MPNetConfig(**_small())).eval()
    pooling, normalize = Pooling(32), Normalize()

    def embed(ids: Tensor, mask: Tensor) -> Tensor:
        features = {"token_embeddings": model(ids, mask).last_hidden_state, "attention_mask": mask}
        return normalize(pooling(features))["sentence_embedding"]

    return Program(embed, {"ids": 0, "mask": 0}, _masked(16))


# images


@program("kornia/blur and edges")
def _() -> Program:
    from kornia.filters import gaussian_blur2d, sobel

    return Program(lambda image: sobel(gaussian_blur2d(image, (5, 5), (1.5, 1.5))), {"image": 0}, _normal(3, 16, 16))


@program("kornia/HardNet")
def _() -> Program:
    from kornia.feature import HardNet

    return _of(HardNet(pretrained=False), _normal(1, 32, 32), "input")


@program("segmentation-models-pytorch/U-Net")
def _() -> Program:
    from segmentation_models_pytorch import Unet

    sizes: dict[str, Any] = {"encoder_depth": 3, "decoder_channels": (32, 16, 8)}
    return _of(Unet("resnet18", encoder_weights=None, **sizes), _normal(3, 32, 32), "x")


@program("open_clip/image encoder")
def _() -> Program:
    model = _open_clip()
    return Program(model.encode_image, {"image": 0}, _normal(3, 32, 32))


@program("open_clip/text encoder")
def _() -> Program:
    model = _open_clip()
    return Program(model.encode_text, {"text": 0}, _ids(16))


def _open_clip() -> Any:
    from open_clip.model import CLIP

    vision = {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 16}
    text = {"context_length": 16, "vocab_size": 100, "width": 32, "heads": 2, "layers": 2}
    return CLIP(embed_dim=32, vision_cfg=vision, text_cfg=text).eval()


@program("MONAI/U-Net")
def _() -> Program:
    from monai.networks.nets import UNet

    sizes: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (4, 8, 16)}
    return _of(UNet(**sizes, strides=(2, 2)), _normal(1, 32, 32), "x")


@program("MONAI/UNETR")
def _() -> Program:
    from monai.networks.nets import UNETR

    sizes: dict[str, Any] = {"in_channels": 1, "out_channels": 2, "img_size": (32, 32), "feature_size": 4}
    sizes |= {"hidden_size": 48, "mlp_dim": 64, "num_heads": 4, "spatial_dims": 2}
    return Program(UNETR(**sizes).eval(), {"x_in": 0}, _normal(1, 32, 32), 8)


# recommenders, tables


class _Data:
    """What a model of RecBole asks a data set: how many items there are."""

    field2type: dict[str, Any] = {}  # noqa: RUF012

    def num(self, _: str) -> int:
        """A hundred of each."""
        return 100


_RECBOLE: dict[str, Any] = {
    "USER_ID_FIELD": "user",
    "ITEM_ID_FIELD": "item",
    "NEG_PREFIX": "neg_",
    "device": "cpu",
    "LIST_SUFFIX": "_list",
    "ITEM_LIST_LENGTH_FIELD": "length",
    "MAX_ITEM_LIST_LENGTH": 12,
    "hidden_size": 32,
    "inner_size": 64,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dropout_prob": 0.1,
    "attn_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "initializer_range": 0.02,
    "loss_type": "CE",
    "embedding_size": 32,
    "num_layers": 1,
    "dropout_prob": 0.1,
}


def _sequences(rows: int) -> tuple[Any, ...]:
    lengths = torch.randint(1, 13, (rows,))
    return torch.randint(1, 100, (rows, 12)) * (torch.arange(12) < lengths[:, None]), lengths


@program("RecBole/SASRec")
def _() -> Program:
    from recbole.model.sequential_recommender.sasrec import SASRec

    return Program(SASRec(_RECBOLE, _Data()).eval(), {"item_seq": 0, "item_seq_len": 0}, _sequences)


@program("RecBole/GRU4Rec")
def _() -> Program:
    from recbole.model.sequential_recommender.gru4rec import GRU4Rec

    return Program(GRU4Rec(_RECBOLE, _Data()).eval(), {"item_seq": 0, "item_seq_len": 0}, _sequences)


def _rechub(kind: str) -> Program:
    from torch_rechub.basic.features import DenseFeature, SparseFeature
    from torch_rechub.models import ranking

    sparse = [SparseFeature(f"s{index}", vocab_size=50, embed_dim=8) for index in range(4)]
    dense = [DenseFeature(f"d{index}") for index in range(3)]
    mlp = {"dims": [32, 16], "dropout": 0.1, "activation": "relu"}
    if kind == "DCN":
        model = ranking.DCN(features=dense + sparse, n_cross_layers=2, mlp_params=mlp).eval()
    else:
        model = getattr(ranking, kind)(dense, sparse, mlp).eval()

    def score(numbers: Tensor, kinds: Tensor) -> Tensor:
        columns = {f"d{index}": numbers[:, index] for index in range(3)}
        return model({**columns, **{f"s{index}": kinds[:, index] for index in range(4)}})

    batch = lambda rows: (torch.randn(rows, 3), torch.randint(0, 50, (rows, 4)))  # noqa: E731
    return Program(score, {"numbers": 0, "kinds": 0}, batch, 32)


@program("torch-rechub/DCN")
def _() -> Program:
    return _rechub("DCN")


@program("torch-rechub/WideDeep")
def _() -> Program:
    return _rechub("WideDeep")


@program("tabm/TabM")
def _() -> Program:
    from tabm import TabM

    model = TabM.make(n_num_features=8, d_out=1, n_blocks=2, d_block=32, k=4)
    return _of(model, _normal(8), "x_num")


@program("rtdl-revisiting-models/FT-Transformer")
def _() -> Program:
    from rtdl_revisiting_models import FTTransformer

    kwargs = {**FTTransformer.get_default_kwargs(n_blocks=1), "d_block": 32, "attention_n_heads": 4}
    model = FTTransformer(n_cont_features=6, cat_cardinalities=[4, 7], d_out=2, **kwargs).eval()
    batch = lambda rows: (torch.randn(rows, 6), torch.randint(0, 4, (rows, 2)))  # noqa: E731
    return Program(model, {"x_cont": 0, "x_cat": 0}, batch, 32)


# graphs, physics, time


@program("torch_geometric/dense GCN")
def _() -> Program:
    from torch_geometric.nn import DenseGCNConv

    first, second = DenseGCNConv(8, 16), DenseGCNConv(16, 4)
    net = lambda x, adj: second(first(x, adj).relu(), adj).mean(1)  # noqa: E731
    batch = lambda rows: (torch.randn(rows, 10, 8), (torch.rand(rows, 10, 10) > 0.5).float())  # noqa: E731
    return Program(net, {"x": 0, "adj": 0}, batch)


@program("torch_geometric/GCN over nodes")
def _() -> Program:
    from torch_geometric.nn import GCN

    model = GCN(8, 16, num_layers=2, out_channels=4).eval()
    batch = lambda rows: (torch.randn(rows, 8), torch.randint(0, rows, (2, 64)))  # noqa: E731
    return Program(model, {"x": 0}, batch)


@program("torch_geometric/SchNet-like radial basis")
def _() -> Program:
    from torch_geometric.nn.models.schnet import GaussianSmearing, ShiftedSoftplus

    net = nn.Sequential(GaussianSmearing(0.0, 5.0, 16), nn.Linear(16, 16), ShiftedSoftplus(), nn.Linear(16, 1))
    return Program(net.eval(), {"input": 0}, lambda rows: (torch.rand(rows) * 5,), 64)


@program("e3nn/tensor product")
def _() -> Program:
    from e3nn import o3

    product = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "0e + 1o", "4x0e + 2x1o").eval()
    batch = lambda rows: (torch.randn(rows, 10), torch.randn(rows, 4))  # noqa: E731
    return Program(lambda x, y: product(x, y), {"x": 0, "y": 0}, batch, settings={"options": {"rows": "independent"}})


@program("neuraloperator/FNO")
def _() -> Program:
    from neuralop.models import FNO

    sizes: dict[str, Any] = {"n_modes": (4, 4), "in_channels": 1, "out_channels": 1, "hidden_channels": 8}
    return _of(FNO(**sizes, n_layers=2), _normal(1, 16, 16), "x")


@program("pytorch-forecasting/gated residual network")
def _() -> Program:
    from pytorch_forecasting.models.temporal_fusion_transformer.sub_modules import (
        GatedResidualNetwork,
        InterpretableMultiHeadAttention,
    )

    gate = GatedResidualNetwork(16, 16, 16, 0.1).eval()
    attend = InterpretableMultiHeadAttention(n_head=2, d_model=16, dropout=0.1).eval()

    def step(x: Tensor) -> Tensor:
        hidden = gate(x)
        return attend(hidden, hidden, hidden)[0]

    return Program(step, {"x": 0}, _normal(8, 16))


@program("pytorch-forecasting/N-BEATS blocks")
def _() -> Program:
    from pytorch_forecasting.models.nbeats.sub_modules import NBEATSSeasonalBlock, NBEATSTrendBlock

    sizes: dict[str, Any] = {"units": 32, "backcast_length": 24, "forecast_length": 6}
    trend = NBEATSTrendBlock(thetas_dim=3, num_block_layers=2, **sizes).eval()
    season = NBEATSSeasonalBlock(num_block_layers=2, **sizes).eval()

    def forecast(x: Tensor) -> Tensor:
        back, ahead = trend(x)
        return ahead + season(x - back)[1]

    return Program(forecast, {"x": 0}, _normal(24))


@program("snnTorch/spiking network")
def _() -> Program:
    import snntorch

    first, second = nn.Linear(8, 16), nn.Linear(16, 4)
    spike = snntorch.Leaky(beta=0.9), snntorch.Leaky(beta=0.9)

    def run(x: Tensor) -> Tensor:
        one, two = (cell.reset_mem() for cell in spike)
        total = 0
        for _ in range(5):
            fired, one = spike[0](first(x), one)
            out, two = spike[1](second(fired), two)
            total = total + out
        return total

    return Program(run, {"x": 0}, _normal(8))


# probabilities


@program("GPyTorch/posterior mean")
def _() -> Program:
    import gpytorch

    class Exact(gpytorch.models.ExactGP):
        def __init__(self, x: Tensor, y: Tensor, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    x = torch.rand(20, 2)
    model = Exact(x, x.sum(-1).sin(), gpytorch.likelihoods.GaussianLikelihood()).eval()
    return Program(lambda points: model(points).mean, {"points": 0}, _normal(2))


@program("BoTorch/expected improvement")
def _() -> Program:
    from botorch.acquisition import LogExpectedImprovement
    from botorch.models import SingleTaskGP

    x = torch.rand(12, 2, dtype=torch.float64)
    model = SingleTaskGP(x, x.sum(-1, keepdim=True).sin()).eval()
    gain = LogExpectedImprovement(model, best_f=0.5)
    return Program(gain, {"X": 0}, lambda rows: (torch.rand(rows, 1, 2, dtype=torch.float64),))


@program("zuko/spline flow")
def _() -> Program:
    import zuko

    flow = zuko.flows.NSF(features=3, context=2, transforms=2, hidden_features=(16, 16)).eval()
    density = lambda x, given: flow(given).log_prob(x)  # noqa: E731
    return Program(density, {"x": 0, "given": 0}, lambda rows: (torch.randn(rows, 3), torch.randn(rows, 2)))


# policies


@program("stable-baselines3/PPO network")
def _() -> Program:
    import gymnasium
    from stable_baselines3.common.policies import ActorCriticPolicy

    low, high = -torch.ones(4).numpy(), torch.ones(4).numpy()
    spaces = gymnasium.spaces.Box(low, high), gymnasium.spaces.Discrete(3)
    policy = ActorCriticPolicy(*spaces, lambda _: 1e-3).eval()

    def act(obs: Tensor) -> tuple[Tensor, Tensor]:
        features, value = policy.mlp_extractor(policy.extract_features(obs))
        return policy.action_net(features), policy.value_net(value)

    return Program(act, {"obs": 0}, _normal(4), 32)


@program("tianshou/actor and critic")
def _() -> Program:
    from tianshou.utils.net.common import MLP

    body = MLP(input_dim=8, output_dim=4, hidden_sizes=[64, 64]).eval()
    return Program(lambda obs: body(obs).softmax(-1), {"obs": 0}, _normal(8), 32)


@program("TorchRL/actor of a continuous action")
def _() -> Program:
    from torchrl.modules import MLP, NormalParamExtractor

    net = nn.Sequential(MLP(in_features=8, out_features=4, num_cells=[64, 64]), NormalParamExtractor())
    return _of(net, _normal(8), "input")


@program("CleanRL/agent that samples")
def _() -> Program:
    from torch.distributions import Categorical

    body, head = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 2)

    def act(obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chances = Categorical(logits=head(body(obs)), validate_args=False)
        action = chances.sample()
        return action, chances.log_prob(action), chances.entropy()

    return Program(act, {"obs": 0}, _normal(4))


@program("tensordict/TensorDictModule")
def _() -> Program:
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule

    module = TensorDictModule(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), ["obs"], ["action"])
    ask = lambda obs: module(TensorDict({"obs": obs}, [len(obs)]))["action"]  # noqa: E731
    return Program(ask, {"obs": 0}, _normal(8))
