"""The text part of Kimi K2.5 to K2.7, which is torchtitan's DeepSeek V3: the names of its tensors in files."""

from typing import Any

from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter

from torchtitan_magi.models.names import name_in_files


class KimiAdapter(DeepSeekV3StateDictAdapter):
    """DeepSeek V3's, with the names of files that also have the parts that see pictures."""

    from_hf_map: dict[str, Any]

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map = {name_in_files("kimi_k2_7", theirs): ours for theirs, ours in self.from_hf_map.items()}
