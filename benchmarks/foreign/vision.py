"""Models of images: timm, torchvision and transformers, with random weights and small images."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from foreign.language import ids, small
from foreign.zoo import Foreign, Made, enliven

TIMM = [
    "resnet18", "mobilenetv3_small_050", "efficientnet_lite0", "convnext_atto", "regnety_002", "ghostnet_100",
    "vit_tiny_patch16_224", "deit_tiny_patch16_224", "mixer_s32_224", "edgenext_xx_small", "mobilevit_xxs",
    "poolformer_s12", "tinynet_e", "lcnet_035", "rexnet_100", "hardcorenas_a", "dla34", "vgg11_bn",
    "xcit_nano_12_p16_224",
    "pit_ti_224", "levit_128s", "repvgg_a0", "fastvit_t8", "efficientvit_b0", "swin_tiny_patch4_window7_224",
    "swinv2_cr_tiny_ns_224", "coat_tiny", "cait_xxs24_224", "densenet121", "gmlp_s16_224", "resmlp_12_224",
    "mobileone_s0", "starnet_s1", "tiny_vit_5m_224", "repghostnet_050", "semnasnet_050", "spnasnet_100",
]  # fmt: skip
AT_FULL_SIZE = ("_224", "levit")
"""In the name of models whose tables fit images of 224 x 224 only."""

TORCHVISION = [
    "resnet18", "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5", "mnasnet0_5", "googlenet",
    "efficientnet_b0", "regnet_y_400mf", "convnext_tiny", "alexnet", "densenet121", "swin_t", "vgg11",
]  # fmt: skip

TRUNK = {"image_size": 32, "patch_size": 8}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
TRANSFORMERS: list[tuple[str, str, dict[str, Any]]] = [
    ("ViTModel", "ViTConfig", TRUNK), ("DeiTModel", "DeiTConfig", TRUNK), ("BeitModel", "BeitConfig", TRUNK),
    ("Dinov2Model", "Dinov2Config", TRUNK), ("SwinModel", "SwinConfig", SWIN), ("Swinv2Model", "Swinv2Config", SWIN),
    ("ResNetModel", "ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
                                     "layer_type": "basic"}),
    ("ConvNextModel", "ConvNextConfig", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    ("ConvNextV2Model", "ConvNextV2Config", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    ("CLIPVisionModel", "CLIPVisionConfig", TRUNK), ("SiglipVisionModel", "SiglipVisionConfig", TRUNK),
    ("ViTMAEModel", "ViTMAEConfig", {**TRUNK, "mask_ratio": 0.0}), ("ViTMSNModel", "ViTMSNConfig", TRUNK),
    ("PoolFormerModel", "PoolFormerConfig", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}),
    ("SegformerModel", "SegformerConfig", {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
                                           "num_attention_heads": [1, 2, 2, 4]}),
    ("MobileNetV1Model", "MobileNetV1Config", {"depth_multiplier": 0.25}),
    ("MobileNetV2Model", "MobileNetV2Config", {"depth_multiplier": 0.25}), ("MobileViTModel", "MobileViTConfig",
     {"image_size": 64, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32]}),
    ("RegNetModel", "RegNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1],
                                     "groups_width": 8}),
    ("LevitModel", "LevitConfig", {"image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 2, 2],
                                   "depths": [1, 1, 1], "key_dim": [8, 8, 8]}),
    ("GLPNModel", "GLPNConfig", {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
                                 "num_attention_heads": [1, 2, 2, 4]}),
    ("VanModel", "VanConfig", {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}),
    ("FocalNetModel", "FocalNetConfig", {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1],
                                         "focal_levels": [2, 2], "focal_windows": [3, 3]}),
    ("CvtModel", "CvtConfig", {"embed_dim": [16, 32, 48], "num_heads": [1, 2, 4], "depth": [1, 1, 1]}),
    ("PvtModel", "PvtConfig", {"image_size": 64, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
                               "num_attention_heads": [1, 2, 2, 4]}),
    ("EfficientNetModel", "EfficientNetConfig", {"width_coefficient": 0.25, "depth_coefficient": 0.25,
                                             "hidden_dim": 64}),
    ("YolosModel", "YolosConfig", {"image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 4}),
    ("DPTModel", "DPTConfig", {**TRUNK, "backbone_out_indices": [0, 1, 1, 1], "neck_hidden_sizes": [8, 8, 8, 8]}),
    ("HieraModel", "HieraConfig", {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 1, 1, 1]}),
    ("IJepaModel", "IJepaConfig", TRUNK), ("Swin2SRModel", "Swin2SRConfig", {"image_size": 16, "embed_dim": 16,
     "depths": [2], "num_heads": [2], "window_size": 4, "patch_size": 1}),
]  # fmt: skip


def image(size: int, count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def of_timm(name: str) -> Made:
    import timm

    torch.manual_seed(0)
    full = any(part in name for part in AT_FULL_SIZE)
    return Made(
        enliven(timm.create_model(name, pretrained=False, num_classes=10)),
        (image(224 if full else 64, 1 if full else 2),),
    )


def of_torchvision(name: str) -> Made:
    from torchvision import models

    torch.manual_seed(0)
    more = {"init_weights": True} if name == "googlenet" else {}
    return Made(enliven(models.get_model(name, weights=None, num_classes=10, **more)), (image(64),))


def of_transformers(model: str, config: str, more: dict[str, Any]) -> Made:
    import transformers

    torch.manual_seed(0)
    size = more.get("image_size", 64)
    size = size[0] if isinstance(size, list) else size
    return Made(enliven(getattr(transformers, model)(small(config, **more))), (), {"pixel_values": image(size)})


def table_transformer() -> Made:
    import transformers

    trunk = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = small(
        "TableTransformerConfig", use_timm_backbone=False, backbone=None, backbone_config=trunk, num_queries=5
    )
    return Made(enliven(transformers.TableTransformerModel(config)), (image(32),))


def clip() -> Made:
    import transformers

    text, vision = small("CLIPTextConfig").to_dict(), small("CLIPVisionConfig", **TRUNK).to_dict()
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return Made(enliven(transformers.CLIPModel(config)), (), {"input_ids": ids(), "pixel_values": image(32)})


FAMILIES = [
    [
        *(
            Foreign("transformers", model, partial(of_transformers, model, kind, more))
            for model, kind, more in TRANSFORMERS
        ),
        Foreign("transformers", "TableTransformerModel", table_transformer),
        Foreign("transformers", "CLIPModel", clip),
    ],
    [Foreign("timm", name, partial(of_timm, name)) for name in TIMM],
    [Foreign("torchvision", name, partial(of_torchvision, name)) for name in TORCHVISION],
]
