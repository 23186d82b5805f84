"""The report page in a real browser and as text, the figures, the Markdown table, and the exports."""

import html.parser
import json
import re
import subprocess
from pathlib import Path

import pytest
from evaluation_samples import make_result, make_samples, u_shaped_rates

from opsd.comparison import compare
from opsd.eval_table import EXPORT_FORMS, results_table, to_lighteval, to_lm_eval
from opsd.report import write_report
from opsd.report_figures import draw_figures, to_svg
from opsd.report_html import escape, shorten

CHROMIUM = Path("/usr/bin/chromium")
BROWSER_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
ATTACK = "<script>document.title='taken over'</script><img src=x onerror=\"document.title='taken over'\"></pre></details>\x1b[31m\u202e end"


@pytest.fixture(scope="module")
def evaluations():
    rates = u_shaped_rates(30, 7)
    samples = [make_samples(rates, 12, 1), make_samples([min(1.0, r + 0.08) for r in rates], 12, 2)]
    samples[1][0]["text"] = ATTACK
    samples[1][1]["extracted"] = "<script>1</script>"
    samples[1][2]["text"] = "long " * 5000
    results = [
        make_result("base <b>$x^$", samples[0], 30, 12, adapter=None, run_seed=1),
        make_result("opsd", samples[1], 30, 12, run_seed=2, training={"run_dir": "r", "step": 100}),
    ]
    return results, samples


@pytest.fixture(scope="module")
def report(evaluations, tmp_path_factory):
    results, samples = evaluations
    folder = tmp_path_factory.mktemp("report")
    comparison = compare(results[:1], results[1:])
    return write_report(
        folder, results, samples, comparison=comparison, problem_texts={"0": "Is 1 < 2 & <script>x</script>?"}
    ), comparison


class Tags(html.parser.HTMLParser):
    """Collects tags, attributes and text as a browser's parser would see them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text.append(data)


def test_page_is_self_contained_and_model_text_is_escaped(report):
    (page, *_), _ = report
    parsed = Tags(page.read_text())
    assert (
        "script" not in parsed.tags
        and "img" not in parsed.tags
        and "link" not in parsed.tags
        and "b" not in parsed.tags
    )
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name == "src"]
    links = [value for name, value in parsed.attributes if name in ("href", "xlink:href")]
    assert links and all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert "url(http" not in page.read_text()
    text = "".join(parsed.text)
    assert "<script>document.title='taken over'</script>" in text and "⟨U+001B⟩[31m⟨U+202E⟩" in text
    assert "characters left out; samples.jsonl has them" in text
    ids = [value for name, value in parsed.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_page_shows_scores_comparison_and_bounds(report, evaluations):
    (page, *figures), comparison = report
    text = "".join(Tags(page.read_text()).text)
    for part in (
        "avg@12 = ",
        comparison.verdict,
        "these problems",
        "new problems",
        "every truncated sample were right",
        "Provenance",
        "no_box",
    ):
        assert part in text
    assert "Is 1 < 2 & <script>x</script>?" in text
    assert [f.name for f in figures] == ["score.png", "problems.png", "lengths.png"]
    assert all(f.read_bytes().startswith(b"\x89PNG") and f.stat().st_size > 5000 for f in figures)


@pytest.mark.skipif(not CHROMIUM.is_file(), reason=f"no browser at {CHROMIUM}; install chromium to open the page")
def test_page_in_a_browser(report, tmp_path):
    (page, *_), _ = report
    command = [str(CHROMIUM), *BROWSER_FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    dom = Tags(done.stdout)
    title = re.search(r"<title>(.*?)</title>", done.stdout).group(1)
    assert title == "aime24: base &lt;b&gt;$x^$, opsd"
    assert "script" not in dom.tags and "img" not in dom.tags
    assert "&lt;script&gt;document.title='taken over'&lt;/script&gt;" in done.stdout
    assert dom.tags.count("svg") == 3 and dom.tags.count("figure") == 3
    # Every completion is inside its own <details>: the closing tags in the attack closed nothing.
    assert dom.tags.count("details") == 1 + 30 + 720 + 2
    assert dom.tags.count("pre") == 1 + 720 + 2


def test_learning_curve_needs_two_checkpoints(evaluations, tmp_path):
    results, samples = evaluations
    curve = [results[0]] + [
        make_result(f"step {s}", samples[1], 30, 12, training={"run_dir": "r", "step": s}, run_seed=s)
        for s in (100, 25, 50)
    ]
    written = write_report(tmp_path, curve, [[]] * 4)
    assert [f.name for f in written] == ["report.html", "score.png", "problems.png", "learning_curve.png"]
    text = "".join(Tags(written[0].read_text()).text)
    assert text.index("step 25") < text.index("step 50") < text.index("step 100")
    assert "Completions" not in text
    assert "learning_curve" not in draw_figures(results, samples)


def test_figures_are_the_same_every_time(evaluations):
    first, second = (to_svg(draw_figures(*evaluations)["lengths"], "lengths") for _ in range(2))
    assert first == second and first.startswith("<svg") and "<style" not in first and "http://purl" not in first


def test_long_benchmarks_and_missing_samples_are_drawn(evaluations, tmp_path):
    rates = u_shaped_rates(130, 1)
    samples = [s for s in make_samples(rates, 2, 1) if s["problem_id"] != "5"]
    written = write_report(tmp_path, [make_result("long", samples, 130, 2)], [samples])
    assert len(written) == 4
    with pytest.raises(ValueError, match="share their problems"):
        write_report(tmp_path, [evaluations[0][0], make_result("long", samples, 130, 2)], [[], []])
    with pytest.raises(ValueError, match="one list of samples per result"):
        write_report(tmp_path, [evaluations[0][0]], [])


def test_escape_and_shorten():
    assert escape("a<b>&\"'\x00\n\tüπ中") == "a&lt;b&gt;&amp;&quot;&#x27;⟨U+0000⟩\n\tüπ中"
    assert escape("\ud800\u200b") == "⟨U+D800⟩⟨U+200B⟩"
    assert shorten("x" * 4000) == "x" * 4000
    assert "1000 characters left out" in shorten("a" * 5000)


def test_table_groups_by_regime_and_escapes_names(evaluations):
    results, samples = evaluations
    other = make_result("fp8 | run", samples[0], 30, 12, regime_hash="2" * 16)
    text = results_table([*results, other])
    assert text.count("| result |") == 2
    rows = [line for line in text.splitlines() if line.startswith(("| base", "| opsd", "| fp8"))]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [12, 12, 12]
    assert "&lt;b&gt;" in rows[0] and "fp8 \\| run" in rows[2]
    s = results[1]["statistics"]
    assert (
        f"{100 * s['avg_at_k']:.1f} | {100 * s['standard_error_same_problems']:.1f}" in rows[1] and "360/360" in rows[1]
    )
    with pytest.raises(ValueError, match="schema='x' must be 'opsd-eval/1'"):
        results_table([results[0] | {"schema": "x"}])


def test_exports(evaluations):
    result = evaluations[0][1]
    s = result["statistics"]
    lm_eval = json.loads(json.dumps(to_lm_eval(result)))
    assert lm_eval["results"]["aime24"]["avg_at_k,none"] == s["avg_at_k"]
    assert lm_eval["results"]["aime24"]["avg_at_k_stderr,none"] == s["standard_error_new_problems"]
    assert lm_eval["results"]["aime24"]["maj@12,none"] == s["majority_at_k"]["12"]
    assert set(lm_eval) >= {
        "results",
        "configs",
        "versions",
        "n-shot",
        "n-samples",
        "higher_is_better",
        "config",
        "git_hash",
    }
    lighteval = to_lighteval(result)
    assert lighteval["results"]["opsd|aime24|0"]["avg@12"] == s["avg_at_k"] == lighteval["results"]["all"]["avg@12"]
    assert set(EXPORT_FORMS) == {"lm-eval", "lighteval"}
    alone = make_result("one", make_samples([0.5, 0.5], 1, 0), 2, 1)
    assert to_lm_eval(alone)["results"]["aime24"]["avg_at_k_stderr_same_problems,none"] == "N/A"
