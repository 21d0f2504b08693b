"""Models of images, videos, sound, series and graphs, and models that make images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from public_models.rows import DEEP, HEADS, SHORT, Row, called, given, hf, images, timm, vision


def seen() -> list[Row]:
    out = [
        hf("vision", name, f"{kind}ForImageClassification", images(**more), {"num_labels": 10}, narrow)
        for name, kind, narrow, more in (
            ("ViT-B/16", "ViT", SHORT, {}), ("DINOv2-B", "Dinov2", SHORT, {}), ("DeiT-B", "DeiT", SHORT, {}),
            ("Swin-T", "Swin", {}, {}), ("Swin-V2-T", "Swinv2", {}, {}), ("BEiT-B", "Beit", SHORT, {}),
            ("ConvNeXt-T", "ConvNext", {}, {}), ("MobileViT-S", "MobileViT", {}, {"size": 256}),
        )
    ]  # fmt: skip
    pixels = {"pixel_values": lambda: torch.randn(2, 3, 224, 224)}
    out += [
        hf("vision", "ViT-MAE", "ViTMAEForPreTraining", given(**pixels), {}, SHORT | {"decoder_num_hidden_layers": 2}),
        hf("vision", "SegFormer-B0", "SegformerForSemanticSegmentation", given(
            pixel_values=lambda: torch.randn(2, 3, 128, 128), labels=lambda: torch.ones(2, 128, 128).long()), {}),
        hf("vision", "VideoMAE-B", "VideoMAEForVideoClassification", given(
            pixel_values=lambda: torch.randn(1, 16, 3, 224, 224), labels=lambda: torch.tensor([0])), {}, SHORT),
        hf("vision", "TimeSformer-B", "TimesformerForVideoClassification", given(
            pixel_values=lambda: torch.randn(1, 8, 3, 224, 224), labels=lambda: torch.tensor([0])), {}, SHORT),
    ]  # fmt: skip
    return out


def with_text() -> list[Row]:
    """Vision and text."""
    pixels = {"pixel_values": lambda: torch.randn(2, 3, 224, 224)}
    return [
        hf("vision and text", "CLIP B/32", "CLIPModel", given(
            input_ids=lambda: torch.randint(3, 49000, (2, 16)), pixel_values=pixels["pixel_values"],
            return_loss=lambda: True), {}),
        hf("vision and text", "SigLIP-B", "SiglipModel", given(
            input_ids=lambda: torch.randint(3, 31000, (2, 16)), pixel_values=pixels["pixel_values"],
            return_loss=lambda: True), {}),
        hf("vision and text", "BLIP", "BlipForConditionalGeneration", given(
            input_ids=lambda: torch.randint(3, 30000, (2, 16)), labels=lambda: torch.randint(3, 30000, (2, 16)),
            pixel_values=lambda: torch.randn(2, 3, 384, 384)), {}, {"vision_config": SHORT, "text_config": SHORT}),
        hf("vision and text", "LLaVA 1.5", "LlavaForConditionalGeneration", with_image(576, 336, 32000),
            {"image_token_index": 31999, "text_config": DEEP}, {
                "text_config": HEADS | {"model_type": "llama", "vocab_size": 32000},
                "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": 3, "hidden_size": 128,
                                  "intermediate_size": 256, "num_attention_heads": 4, "image_size": 336,
                                  "patch_size": 14}}),
        hf("vision and text", "Qwen2-VL", "Qwen2VLForConditionalGeneration", with_grid(1176),
            {"text_config": DEEP | WIDE, "vision_config": {"depth": 4, "hidden_size": 8192}},
            {"text_config": HEADS | MULTI | {"vocab_size": 152064},
             "vision_config": {"depth": 2, "embed_dim": 128, "num_heads": 4, "hidden_size": 256}}),
        hf("vision and text", "Qwen2.5-VL", "Qwen2_5_VLForConditionalGeneration", with_grid(1176),
            {"text_config": DEEP | WIDE, "vision_config": {"depth": 4, "out_hidden_size": 8192}},
            {"text_config": HEADS | MULTI | {"vocab_size": 152064},
             "vision_config": {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4,
                               "out_hidden_size": 256, "fullatt_block_indexes": [1]}}),
    ]  # fmt: skip


def detectors() -> list[Row]:
    """Detection and depth."""
    pixels = {"pixel_values": lambda: torch.randn(2, 3, 256, 256)}  # Labels are matched on the host, from values.
    return [
        hf("detection", "DETR R50", "DetrForObjectDetection", given(**pixels), OWN_BACKBONE),
        hf("detection", "Conditional DETR", "ConditionalDetrForObjectDetection", given(**pixels), OWN_BACKBONE),
        hf("detection", "Deformable DETR", "DeformableDetrForObjectDetection", given(**pixels), OWN_BACKBONE),
        hf("detection", "RT-DETR R50", "RTDetrForObjectDetection", given(
            pixel_values=pixels["pixel_values"]), {}),
        hf("detection", "YOLOS", "YolosForObjectDetection", given(pixel_values=lambda: torch.randn(1, 3, 512, 864)),
            {}, SHORT),
        hf("detection", "MaskFormer", "MaskFormerForInstanceSegmentation", given(
            pixel_values=pixels["pixel_values"]), {}),
        hf("detection", "Mask2Former", "Mask2FormerForUniversalSegmentation", given(
            pixel_values=pixels["pixel_values"]), {}),
        hf("detection", "DPT depth", "DPTForDepthEstimation", given(
            pixel_values=lambda: torch.randn(1, 3, 384, 384)), {}),
    ]  # fmt: skip


WIDE = {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}}
MULTI = {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6}}
OWN_BACKBONE: dict[str, Any] = {}


def with_image(tokens: int, size: int, vocabulary: int) -> Callable[[Any], Mapping[str, Any]]:
    """A text with one image, whose places have an id of their own."""

    def inputs(module: Any) -> Mapping[str, Any]:
        ids = torch.randint(3, vocabulary - 10, (1, tokens + 32))
        ids[:, 8 : 8 + tokens] = vocabulary - 1
        return {"input_ids": ids, "labels": ids.clone(), "pixel_values": torch.randn(1, 3, size, size)}

    return inputs


def with_grid(width: int) -> Callable[[Any], Mapping[str, Any]]:
    """A text with one image of 8 by 8 patches, of which four make a token."""

    def inputs(module: Any) -> Mapping[str, Any]:
        ids = torch.randint(3, 1000, (1, 48))
        ids[:, 4:20] = module.config.image_token_id
        kinds = torch.zeros_like(ids)
        kinds[:, 4:20] = 1
        return {"input_ids": ids, "labels": ids.clamp(max=900), "pixel_values": torch.randn(64, width),
                "image_grid_thw": torch.tensor([[1, 8, 8]]), "mm_token_type_ids": kinds,
                "attention_mask": torch.ones_like(ids)}  # fmt: skip

    return inputs


def waves(seconds: float = 1.0, **more: Callable[[], Any]) -> Callable[[Any], Mapping[str, Any]]:
    """Sound at 16 kHz."""
    return given(input_values=lambda: torch.randn(2, int(16000 * seconds)), **more)


def heard() -> list[Row]:
    words = {"labels": lambda: torch.randint(3, 30, (2, 12))}
    out = [hf("speech", name, kind, waves(**words), {}, SHORT | {"layerdrop": 0.0}) for name, kind in (
        ("wav2vec 2.0", "Wav2Vec2ForCTC"), ("HuBERT", "HubertForCTC"), ("WavLM", "WavLMForCTC"), ("SEW", "SEWForCTC"),
        ("UniSpeech", "UniSpeechForCTC"), ("Data2Vec audio", "Data2VecAudioForCTC"))]  # fmt: skip
    out += [
        hf("speech", "Whisper tiny", "WhisperForConditionalGeneration", given(
            input_features=lambda: torch.randn(1, 80, 3000), labels=lambda: torch.randint(3, 5000, (1, 32))), {},
            {"encoder_layers": 2, "decoder_layers": 2}),
        hf("speech", "AST", "ASTForAudioClassification", given(
            input_values=lambda: torch.randn(1, 1024, 128), labels=lambda: torch.tensor([0])), {}, SHORT),
        hf("speech", "EnCodec", "EncodecModel", given(input_values=lambda: torch.randn(1, 1, 24000)), {}),
        hf("speech", "DAC", "DacModel", given(input_values=lambda: torch.randn(1, 1, 8192)), {}),
        replace(hf("speech", "VITS", "VitsModel", given(
            input_ids=lambda: torch.randint(1, 30, (1, 24))), {}), options={"training": False, "nonzero_share": 1.0}),
        hf("time series", "PatchTST", "PatchTSTForPrediction", given(
            past_values=lambda: torch.randn(2, 32, 1), future_values=lambda: torch.randn(2, 24, 1)), {}),
        hf("time series", "Autoformer", "AutoformerForPrediction", series, {"prediction_length": 12,
            "context_length": 24, "lags_sequence": [1, 2, 3], "num_time_features": 2, "layerdrop": 0.1}),
        hf("time series", "Informer", "InformerForPrediction", series, {"prediction_length": 12,
            "context_length": 24, "lags_sequence": [1, 2, 3], "num_time_features": 2, "attention_type": "full"}),
    ]  # fmt: skip
    return out


def series(module: Any) -> Mapping[str, Any]:
    """The past of two series and what is to be predicted."""
    past, future = 27, 12
    return {"past_values": torch.randn(2, past), "past_time_features": torch.randn(2, past, 2),
            "past_observed_mask": torch.ones(2, past), "future_values": torch.randn(2, future),
            "future_time_features": torch.randn(2, future, 2)}  # fmt: skip


def noised(channels: int, size: int, *context: int, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        out = {"sample": torch.randn(1, channels, size, size), "timestep": torch.tensor([10])}
        return out | ({"encoder_hidden_states": torch.randn(1, *context)} if context else {}) | more

    return make


def latent(channels: int, width: int, *pooled: int) -> Callable[[], Any]:
    def make() -> Any:
        out = {"hidden_states": torch.randn(1, channels, 16, 16), "timestep": torch.tensor([10])}
        out |= {"encoder_hidden_states": torch.randn(1, 32, width)} if width else {}
        return out | ({"pooled_projections": torch.randn(1, *pooled)} if pooled else {})

    return make


def diffusers() -> list[Row]:
    def row(name: str, kind: str, inputs: Callable[[], Any], area: str = "diffusion", **settings: Any) -> Row:
        return Row(name=name, package="diffusers", area=area, build=called(f"diffusers.{kind}", inputs, **settings))

    blocks = {"num_layers": 4, "attention_head_dim": 32, "num_attention_heads": 8}
    return [
        row("DDPM U-Net", "UNet2DModel", noised(3, 32), block_out_channels=(64, 128, 128, 256)),
        row("Stable Diffusion U-Net", "UNet2DConditionModel", noised(4, 16, 16, 768), cross_attention_dim=768,
            block_out_channels=(160, 320, 640, 640)),
        row("AutoencoderKL", "AutoencoderKL", lambda: (torch.randn(1, 3, 64, 64),), block_out_channels=(64, 128),
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=2),
        row("VQ-VAE", "VQModel", lambda: (torch.randn(1, 3, 32, 32),), block_out_channels=(64,)),
        row("DiT", "DiTTransformer2DModel", lambda: {
            "hidden_states": torch.randn(1, 4, 16, 16), "timestep": torch.tensor([10]),
            "class_labels": torch.tensor([1])}, sample_size=16, out_channels=8, **blocks),
        row("PixArt", "PixArtTransformer2DModel", lambda: {
            "hidden_states": torch.randn(1, 4, 16, 16), "timestep": torch.tensor([10]),
            "encoder_hidden_states": torch.randn(1, 16, 256),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}, sample_size=16, caption_channels=256,
            cross_attention_dim=256, **blocks),
        row("Stable Diffusion 3", "SD3Transformer2DModel", latent(16, 256, 128), sample_size=16,
            joint_attention_dim=256, caption_projection_dim=256, pooled_projection_dim=128, **blocks),
        row("Flux", "FluxTransformer2DModel", lambda: {
            "hidden_states": torch.randn(1, 64, 64), "encoder_hidden_states": torch.randn(1, 16, 256),
            "pooled_projections": torch.randn(1, 128), "timestep": torch.tensor([0.5]), "img_ids": torch.zeros(64, 3),
            "txt_ids": torch.zeros(16, 3)}, in_channels=64, num_layers=2, num_single_layers=4, attention_head_dim=32,
            num_attention_heads=8, joint_attention_dim=256, pooled_projection_dim=128, axes_dims_rope=(8, 12, 12)),
        row("ControlNet", "ControlNetModel", noised(4, 16, 16, 256, controlnet_cond=torch.zeros(1, 3, 128, 128)),
            cross_attention_dim=256, block_out_channels=(64, 128, 128, 128)),
        row("Video U-Net", "UNet3DConditionModel", lambda: {
            "sample": torch.randn(1, 4, 4, 16, 16), "timestep": torch.tensor([10]),
            "encoder_hidden_states": torch.randn(1, 16, 256)}, cross_attention_dim=256,
            block_out_channels=(64, 128, 128, 128)),
    ]  # fmt: skip


def graphs() -> list[Row]:
    def edges() -> Any:
        return torch.randn(64, 32), torch.randint(0, 64, (2, 256))

    def row(name: str, inputs: Callable[[], Any] = edges, *args: Any, **settings: Any) -> Row:
        build = called(f"torch_geometric.nn.models.{name}", inputs, *args, **settings)
        return Row(name=name, package="torch_geometric", area="graph", build=build)

    sizes = {"in_channels": 32, "hidden_channels": 128, "num_layers": 4, "out_channels": 16}
    degrees = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.ones(8, dtype=torch.int64)}
    return [
        row("GCN", **sizes), row("GraphSAGE", **sizes), row("GAT", heads=4, **sizes), row("GIN", **sizes),
        row("PNA", **sizes, **degrees), row("EdgeCNN", **sizes), row("LightGCN", lambda: (
            torch.randint(0, 64, (2, 256)),), 64, 32, 3),
        row("GraphUNet", in_channels=32, hidden_channels=64, out_channels=16, depth=3),
        row("AttentiveFP", lambda: (*edges(), torch.randn(256, 8), torch.zeros(64, dtype=torch.int64)), 32, 64, 16, 8,
            3, 2),
        row("LINKX", edges, 64, 32, 64, 16, 2),
        row("SGFormer", lambda: (*edges(), torch.zeros(64, dtype=torch.int64)), 32, 64, 16),
        row("PMLP", edges, 32, 64, 16, 3),
    ]  # fmt: skip


def photographs() -> list[Row]:
    names = ("resnet50", "resnetv2_50", "regnety_040", "efficientnet_b0", "mobilenetv3_large_100", "convnext_tiny",
             "vit_base_patch16_224", "deit_small_patch16_224", "swin_tiny_patch4_window7_224", "mixer_b16_224",
             "densenet121", "maxvit_tiny_tf_224", "coatnet_0_rw_224", "poolformer_s12", "xcit_tiny_12_p16_224",
             "pvt_v2_b0", "edgenext_small", "levit_128", "gmlp_s16_224", "nfnet_f0",
             "eva02_tiny_patch14_224")  # fmt: skip
    sized = {"mixer_b16_224": 224, "nfnet_f0": 192}
    return [timm(name, sized.get(name, 224)) for name in names] + [
        vision(name) for name in ("alexnet", "vgg11", "googlenet", "shufflenet_v2_x1_0", "squeezenet1_0", "mnasnet1_0")
    ] + [
        vision("segmentation.deeplabv3_resnet50", 128, "detection", weights_backbone=None),
        vision("segmentation.fcn_resnet50", 128, "detection", weights_backbone=None),
        detector("fasterrcnn_resnet50_fpn"), detector("retinanet_resnet50_fpn"),
    ]  # fmt: skip


def detector(name: str) -> Row:
    found = {"boxes": [[8.0, 8.0, 60.0, 60.0]], "labels": [1]}

    def inputs() -> Any:
        return [torch.randn(3, 128, 128)], [{key: torch.tensor(value) for key, value in found.items()}]

    path = f"torchvision.models.detection.{name}"
    build = called(path, inputs, weights=None, weights_backbone=None, min_size=128, max_size=128)
    return Row(name=name, package="torchvision", area="detection", build=build)
