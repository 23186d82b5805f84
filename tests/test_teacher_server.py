"""A teacher behind a server: its entries in the loss, its client, and a training that equals one with the teacher at hand."""

import math

import pytest
import torch
from fake_vllm_server import KEY, FakeVLLM
from test_trainer import losses, make_trainer
from transformers import AutoModelForCausalLM

from opsd.args import OPSDConfig
from opsd.fused_divergence import fused_generalized_jsd
from opsd.teacher_scores import TopKProjection, TopKScores
from opsd.teacher_server import TeacherServer
from opsd.vllm_client import EngineDied

TOP_K = 5


def make_case(tokens=7, vocab=40, hidden=6):
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    teacher = student + 0.5 * torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    logps = (teacher @ weight.t()).log_softmax(-1)
    top = logps.topk(TOP_K, dim=-1)
    return student.requires_grad_(), teacher, weight, TopKScores(top.indices, top.values)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("tail", "temperature"), [(True, 1.0), (False, 1.0), (False, 1.3)])
@pytest.mark.parametrize("clip_mode", ["none", "entry", "direction"])
def test_the_entries_of_a_server_give_the_loss_of_the_whole_teacher(beta, tail, temperature, clip_mode):
    student, teacher, weight, scores = make_case()
    clip = math.inf if clip_mode == "none" else 0.05
    mask = torch.arange(7) != 3
    settings = dict(
        beta=beta, temperature=temperature, top_k=TOP_K, tail=tail, clip_mode=clip_mode, entry_clip=clip, chunk_size=3
    )
    expected, expected_sums = fused_generalized_jsd(student, teacher, weight, mask, **settings)
    (expected_gradient,) = torch.autograd.grad(expected, student)
    loss, sums = fused_generalized_jsd(student, scores, weight, mask, **settings)
    (gradient,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    for name in ("divergence_sum", "clipped_tokens", "student_top_k_mass_sum"):
        torch.testing.assert_close(sums[name], expected_sums[name], msg=name)


def test_a_certain_teacher_leaves_no_mass_and_other_counts_are_refused():
    sure = TopKScores(torch.tensor([[3, 1]]), torch.tensor([[0.0, -200.0]]))
    logits = TopKProjection(6, torch.float32, tail=True).logits(sure, 1.0)
    assert logits.isfinite().all() and logits.softmax(-1)[0, 3] == 1
    student, _, weight, scores = make_case()
    with pytest.raises(ValueError, match="top_k=4 must be the teacher's 5 entries"):
        fused_generalized_jsd(student, scores, weight, None, beta=0.0, top_k=4)


@pytest.fixture
def server(folder, tokenizer):
    """A server that scores as the model in `folder` does, one more entry where the token is not among the likeliest."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def scorer(ids, count):
        answer = [None]
        for logps, token in zip(model(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1], ids[1:], strict=True):
            order = logps.argsort(descending=True)
            ranks = {int(t): rank for rank, t in enumerate(order.tolist(), 1)}
            kept = [token, *order[:count].tolist()]  # vLLM names the prompt's own token first
            answer.append({str(t): {"logprob": float(logps[t]), "rank": ranks[t], "decoded_token": "x"} for t in kept})
        return answer

    fake = FakeVLLM()
    fake.scorer, fake.tokenizer = scorer, tokenizer
    yield fake
    fake.stop()


def test_scores_are_the_likeliest_entries_at_the_completion(server, folder, tokenizer):
    teacher = TeacherServer(server.url, KEY, TOP_K, len(tokenizer), tokenizer)
    prompts, completions = [[5, 6, 7], [8, 9]], [[10, 11], [12, 13, 14]]
    scores = teacher.score(prompts, completions)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, completion, found in zip(prompts, completions, scores, strict=True):
        with torch.no_grad():
            logps = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        top = logps.topk(TOP_K, dim=-1)
        assert torch.equal(found.ids, top.indices)
        torch.testing.assert_close(found.logps, top.values, atol=1e-5, rtol=1e-5)


def test_what_a_server_does_wrong_is_named(server, tokenizer):
    with pytest.raises(ValueError, match="OPSD_VLLM_API_KEY is not set"):
        TeacherServer(server.url, None, TOP_K, len(tokenizer), tokenizer)
    with pytest.raises(ValueError, match="the key was refused"):
        TeacherServer(server.url, "wrong", TOP_K, len(tokenizer), tokenizer)
    teacher = TeacherServer(server.url, KEY, TOP_K, 20, tokenizer)
    with pytest.raises(RuntimeError, match="the student has 20: a teacher must share its vocabulary"):
        teacher.score([[5, 6]], [[7, 8, 9, 10, 11, 12]])
    server.scorer = lambda ids, count: [None, *({"1": {"logprob": -1.0, "rank": 1}} for _ in ids[1:])]
    with pytest.raises(RuntimeError, match="not all with 5 entries; is loss_top_k above the server's --max-logprobs"):
        teacher.score([[5, 6]], [[7]])
    server.tokenizer = lambda text, **_: {"input_ids": [1, 2, 3]}
    with pytest.raises(ValueError, match="as other ids than the student"):
        TeacherServer(server.url, KEY, TOP_K, len(tokenizer), tokenizer)


@pytest.mark.parametrize("tail", [True, False])
def test_training_equals_one_with_the_teacher_at_hand(server, folder, tokenizer, tmp_path, tail):
    options = dict(max_steps=2, loss_top_k=TOP_K, loss_tail=tail, teacher_kind="model")
    here = make_trainer(folder, tokenizer, tmp_path, teacher_model=str(folder), **options)
    there = make_trainer(folder, tokenizer, tmp_path, teacher_model=server.url, api_key=KEY, **options)
    here.train(), there.train()
    assert losses(there) == pytest.approx(losses(here), rel=1e-4)


def test_a_teacher_that_goes_away_ends_the_run_after_a_checkpoint(server, folder, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("opsd.vllm_client.WAITS_S", (0.01,))
    options = dict(max_steps=3, loss_top_k=TOP_K, teacher_kind="model", teacher_model=server.url, api_key=KEY)
    trainer = make_trainer(folder, tokenizer, tmp_path, **options)
    server.drop_after = 8  # the first step's sequences
    with pytest.raises(EngineDied, match="restart it and resume from the last checkpoint"):
        trainer.train()
    assert (tmp_path / "run" / "checkpoint-1" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_top_k": 0}, "loss_top_k=0 must be > 0"),
        ({"distill_temperature": 1.1}, "distill_temperature=1.1 must be 1, or loss_tail=false"),
        ({"token_weight": "discrepancy"}, "token_weight=discrepancy needs the teacher's own weights"),
        ({"teacher_model": "http://user:secret@host:1"}, "must look like http://127.0.0.1:8001"),
    ],
)
def test_what_a_server_cannot_do_is_refused_by_name(tmp_path, changes, words):
    values = dict(teacher_kind="model", teacher_model="http://127.0.0.1:1", loss_top_k=5, max_steps=1, use_cpu=True)
    OPSDConfig(output_dir=str(tmp_path), **values)
    with pytest.raises(ValueError, match=words):
        OPSDConfig(output_dir=str(tmp_path), **values | changes)
