"""How a model's makers advise to sample from it."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.cluster.text.folder_files import JsonObject


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What `generation_config.json` says of sampling; None where it says nothing. Nothing applies them by itself.

    Attributes:
        temperature: 0 or more.
        top_k: 0 or more; 0 is no limit.
        top_p: Above 0, at most 1.
        min_p: From 0 to 1.
        repetition_penalty: Above 0; 1 is none.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_json(cls, config: JsonObject) -> GenerationDefaults:
        """Raises TokenizerError, which names the field, where a value has a wrong type or range."""
        top_k = config.integer("top_k")
        if top_k is not None and top_k < 0:
            raise config.error("top_k", f"is {top_k}; it is 0 or more")
        return cls(
            temperature=_number(config, "temperature", least=0.0),
            top_k=top_k,
            top_p=_number(config, "top_p", above=0.0, most=1.0),
            min_p=_number(config, "min_p", least=0.0, most=1.0),
            repetition_penalty=_number(config, "repetition_penalty", above=0.0),
        )


def _number(
    config: JsonObject, key: str, *, least: float | None = None, above: float | None = None, most: float | None = None
) -> float | None:
    value = config.number(key)
    if value is None:
        return None
    bounds = [f"{least:g} or more"] if least is not None else [f"above {above:g}"]
    if most is not None:
        bounds.append(f"at most {most:g}")
    too_low = value < least if least is not None else above is not None and value <= above
    if too_low or (most is not None and value > most):
        raise config.error(key, f"is {value:g}; it is {' and '.join(bounds)}")
    return value
