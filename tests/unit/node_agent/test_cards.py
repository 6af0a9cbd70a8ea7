"""Names of card types, from what NVML reports."""

import pytest

from services.node_agent.driver.cards import card_type, memory_of


@pytest.mark.parametrize(
    ("model", "memory_mib", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "H100-80G"),
        ("NVIDIA H100 PCIe", 81559, "H100-80G"),
        ("NVIDIA H100 NVL", 95830, "H100-94G"),
        ("NVIDIA H200", 143771, "H200-141G"),
        ("NVIDIA H20", 97871, "H20-96G"),
        ("NVIDIA GH200 480GB", 97871, "GH200-96G"),
        ("NVIDIA B200", 183359, "B200-180G"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40G"),
        ("NVIDIA A100-PCIE-40GB", 40536, "A100-40G"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100-80G"),
        ("NVIDIA A100-SXM4-80GB", 81251, "A100-80G"),
        ("NVIDIA A800-SXM4-80GB", 81920, "A800-80G"),
        ("NVIDIA L40S", 46068, "L40S-48G"),
        ("NVIDIA L40", 46068, "L40-48G"),
        ("NVIDIA L4", 23034, "L4-24G"),
        ("NVIDIA A10G", 23028, "A10G-24G"),
        ("NVIDIA A40", 46068, "A40-48G"),
        ("NVIDIA A2", 15356, "A2-16G"),
        ("Tesla T4", 15360, "T4-16G"),
        ("Tesla V100-SXM2-32GB", 32510, "V100-32G"),
        ("Tesla V100S-PCIE-32GB", 32510, "V100S-32G"),
        ("NVIDIA RTX A6000", 49140, "A6000-48G"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "RTX6000ADA-48G"),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX4090-24G"),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", 16384, "RTX3080TI-16G"),
        ("Graphics Device", 24576, "GPU-24G"),
        ("NVIDIA X900 512GB", 524288, "X900-512G"),
    ],
)
def test_cards_are_named_by_family_and_sold_size(model: str, memory_mib: int, expected: str) -> None:
    assert card_type(model, memory_mib) == expected


def test_memory_of_a_simulated_card_follows_from_its_name() -> None:
    assert memory_of("H200-141G") == 141 * 1024
    with pytest.raises(ValueError, match="size"):
        memory_of("H200")
