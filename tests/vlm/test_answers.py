# ruff: noqa: RUF001
"""What is a caption, and what is none: replies as servers and local models give them."""

from __future__ import annotations

import math
import time

import pytest

from capvid.errors import AnswerError
from capvid.vlm.answers import MAX_CHARACTERS, Reply, caption_of, captions_of, is_refusal

REFUSALS = (
    "I'm sorry, I can't help with that.",
    "I’m sorry, but I can’t assist with that request.",
    "I'm sorry. I cannot assist with that.",
    "Sorry, I can't help with this.",
    "I cannot provide a description of this video.",
    "I'm unable to view videos. Please describe what you see, and I will help you write a caption.",
    "As an AI language model, I cannot view videos or images.",
    "Unfortunately, I'm not able to identify people in images.",
    "I won't be able to help with that. Is there anything else I can help you with?",
    "I can't assist with identifying individuals.",
    "I apologize, but I am not comfortable describing this content.",
    "I don't see any video attached to your message. Could you please upload it?",
    "**I'm sorry, but I cannot fulfill this request, as it involves a minor.**",
    "Es tut mir leid, aber dabei kann ich nicht helfen.",
    "Tut mir leid, ich kann dir dabei nicht helfen.",
    "Leider kann ich Ihnen bei dieser Anfrage nicht weiterhelfen. Kann ich Ihnen anders helfen?",
    "Ich kann dieses Video leider nicht beschreiben.",
    "Je suis désolé, mais je ne peux pas vous aider avec cela.",
    "Désolée, je ne peux pas répondre à cette demande.",
    "Lo siento, no puedo ayudarte con eso.",
    "Lo siento, pero no puedo describir este video. ¿Hay algo más en lo que pueda ayudarte?",
    "Mi dispiace, ma non posso aiutarti con questa richiesta.",
    "Desculpe, não posso ajudar com isso.",
    "Извините, но я не могу помочь с этим.",
    "К сожалению, я не могу описать это видео.",
    "抱歉，我无法协助满足该请求。",
    "很抱歉，但我不能描述这个视频。",
    "对不起，我不能帮助你。",
    "申し訳ありませんが、そのリクエストにはお応えできません。",
    "すみません、お手伝いできません。",
    "죄송하지만, 그 요청은 도와드릴 수 없습니다.",
    "عذرًا، لا يمكنني المساعدة في ذلك.",
)
CAPTIONS = (
    "A man apologizes to a woman.",
    "A man says sorry to a woman and leaves the room.",
    "A man says, \"I'm sorry, I can't help with that.\"",
    "\"I'm sorry, I can't help with that,\" says a clerk at a counter.",
    "I'm sorry, I can't help you, a nurse tells a visitor at the desk.",
    "Sorry, I can't help you. A clerk shakes his head while a customer walks out.",
    "I can't help falling in love with you, a band plays on a small stage.",
    "I can't get no satisfaction: a band performs in a stadium.",
    "Sorry board game being played by two kids at a table.",
    "A sorry sight: an abandoned boat that nobody can help.",
    "Unfortunately, the skier falls and cannot get up.",
    "I am afraid of heights is written on a T-shirt.",
    "We can see a dog that catches a frisbee.",
    "In this video I can see a man who is cooking.",
    "A robot cannot open the door and falls over.",
    "1. A man enters. 2. A woman sings. 3. They leave.",
    "Unable to lift the weight, a man drops it.",
    "Sorry, no parking, reads a sign next to a driveway.",
    "Ein Mann kann den Weg nicht beschreiben und zuckt mit den Schultern.",
    "Ein Mann sagt, dass es ihm leid tut.",
    "Leider fällt der Kuchen auf den Boden.",
    "Leider kann der Mann dem Hund nicht helfen.",
    "Un homme est désolé et ne peut pas aider son ami.",
    "Malheureusement, le chien ne peut pas sauter la barrière.",
    "Un hombre no puede ayudar a su amigo a levantar la caja.",
    "Lo siento mucho es la canción que canta una mujer.",
    "Un uomo non riesce ad aiutare la donna.",
    "Um homem não consegue ajudar o cachorro.",
    "Мужчина не может помочь собаке.",
    "无法识别的物体出现在天空中。",
    "一个男人向女人道歉。",
    "男性が申し訳なさそうに頭を下げている。",
    "男性は荷物が重くて対応できません。",
    "한 남자가 도움을 받을 수 없습니다.",
    "رجل لا يستطيع مساعدة صديقه.",
)


@pytest.mark.parametrize("text", REFUSALS)
def test_refusals(text: str) -> None:
    with pytest.raises(AnswerError, match="the model refused") as raised:
        caption_of(Reply(text=text), max_length=64)
    assert raised.value.kind == "answer-refusal"


@pytest.mark.parametrize("text", CAPTIONS)
def test_captions_that_are_no_refusals(text: str) -> None:
    assert caption_of(Reply(text=text, finish="stop"), max_length=64).text == text
    thoughtful = caption_of(Reply(text=f"<think>I'm sorry</think>\n\n{text}"), max_length=64)
    assert thoughtful.text == text


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (Reply(text=None), "empty", "the model's answer is empty; change --prompt"),
        (Reply(text=" \n\u200b"), "empty", "the model's answer is empty"),
        (Reply(text="..."), "empty", "the model's answer is empty"),
        (Reply(text="<think>a man</think> "), "empty", "the model only thought and did not answer"),
        (Reply(text="<think>a man", finish="stop"), "empty", "the model only thought and did not answer"),
        (Reply(text="</think> A man. <think> but"), "empty", "the model only thought"),
        (Reply(text="A man walks down the", finish="length"), "truncated", "cut at --max-length 64; use a"),
        (
            Reply(text="<think>a man", finish="length"),
            "truncated",
            "--max-length 64 while the model was thin",
        ),
        (Reply(text="A man", finish="MAX_TOKENS"), "truncated", "cut at --max-length 64"),
        (Reply(text="A man", finish="content_filter"), "blocked", "finish reason content_filter"),
        (Reply(text=None, finish="SAFETY"), "blocked", "a filter of the server blocked the answer"),
        (Reply(text=None, refusal="I'm sorry."), "refusal", "the model refused: I'm sorry."),
        (Reply(text="A man", finish="tool_calls"), "invalid", "the model called a tool"),
        (Reply(text="", finish="stop", called_tool=True), "invalid", "the model called a tool"),
        (Reply(text="a " * MAX_CHARACTERS), "invalid", f"the answer has {2 * MAX_CHARACTERS} characters"),
    ],
)
def test_replies_that_are_no_captions(reply: Reply, kind: str, message: str) -> None:
    with pytest.raises(AnswerError) as raised:
        caption_of(reply, max_length=64)
    assert raised.value.kind == f"answer-{kind}" and message in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "<think>Sorry?</think>A man  walks.",
        "let me see</think>\n\nA man walks.\n",
        "<THINKING>one</THINKING><think>two</think> A man walks.",
        "[THINK]A man?[/THINK]A man walks.",
        "◁think▷ A dog. ◁/think▷A man walks.",
    ],
)
def test_thinking_is_removed(text: str) -> None:
    assert caption_of(Reply(text=text), max_length=64).text == "A man walks."


def test_the_captions_among_several_candidates() -> None:
    good, cut = Reply(text="A man walks."), Reply(text="A man", finish="length")
    assert [caption.text for caption in captions_of([cut, good, good], max_length=9)] == ["A man walks."] * 2
    with pytest.raises(AnswerError, match="cut at --max-length 9"):
        captions_of([cut, Reply(text="")], max_length=9)


def test_tokens_are_counted_to_the_word_that_they_end_in() -> None:
    tokens, logprobs = ["<think>", "x", "</think>", "\n", "A", " ma", "n", " walks", "."], [-1.0] * 10
    ends = [sum(map(len, tokens[: n + 1])) for n in range(len(tokens))]
    caption = caption_of(Reply(text="".join(tokens), ends=ends, logprobs=logprobs), max_length=64)
    # the line break after the thinking belongs to the first word, and the tenth token is the end
    assert [word.logprob for word in caption.words] == [-2, -2, -2] and caption.logprob == -7
    unknown = caption_of(Reply(text="<think>x</think>A man", logprobs=[-1.0] * 3), max_length=64)
    assert math.isnan(unknown.logprob) and math.isnan(unknown.words[0].logprob)
    infinite = caption_of(Reply(text="A", ends=[1], logprobs=[-math.inf]), max_length=64)
    assert math.isnan(infinite.logprob)


def test_hostile_replies_take_little_time() -> None:
    start = time.process_time()
    for text in ("<think>" * 10**6, "</think>" * 10**6, "[/" * 10**6, "a" * 10**7, " " * 10**7):
        with pytest.raises(AnswerError):
            caption_of(Reply(text=text), max_length=64)
    count = MAX_CHARACTERS // 2
    ends = range(1, 2 * count, 2)
    assert len(caption_of(Reply(text="a " * count, ends=ends, logprobs=[-1.0] * count), max_length=64).words)
    for text in ("ich kann kein nicht " * 25, "sorry " * 80, "죄송합니다 도움 " * 40, "je ne peux " * 40):
        is_refusal(text[:500])
    assert time.process_time() - start < 10
