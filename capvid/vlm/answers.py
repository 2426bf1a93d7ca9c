"""From the reply of a chat model to a caption, or to the reason why it is none.

Models that a server runs and models of transformers use the same function, :func:`caption_of`.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from capvid.decoding.caption_generator import Caption, WordScore
from capvid.errors import AnswerError

MAX_CHARACTERS = 100_000  # of a caption; --max-length allows 1000 tokens
_QUOTED = 120  # characters of an answer in a message
_CUT = {"length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"}
_BLOCKED = {
    *("content_filter", "content_filtered", "safety", "recitation", "prohibited_content", "blocklist"),
    *("spii", "image_safety", "sensitive", "guardrail_intervened"),
}
_BROKEN_OFF = {"abort", "aborted", "cancelled", "error"}
_TOOL = {"tool_calls", "tool_use", "function_call", "malformed_function_call"}
_OPENING = re.compile(r"<(?:think|thinking|thought|reasoning)>|\[THINK\]|◁think▷", re.I)
_CLOSING = re.compile(r"</(?:think|thinking|thought|reasoning)>|\[/THINK\]|◁/think▷", re.I)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a chat model generated for one clip.

    Attributes:
        text: the generated text; None if there is none.
        finish: why the model stopped, as in OpenAI's API: ``stop``, ``length`` and so on; empty if unknown.
        refusal: the server's words for a refusal.
        called_tool: whether the model called a tool.
        ends: number of characters of ``text`` up to the end of each token; empty if unknown.
        logprobs: log-probability of each token, and of the end of the text if it is a token.
    """

    text: str | None
    finish: str = ""
    refusal: str = ""
    called_tool: bool = False
    ends: Sequence[int] = ()
    logprobs: Sequence[float] = ()


def is_tag(token: str) -> bool:
    """Return whether a token begins or ends the text in which a model thinks."""
    return any(tag.fullmatch(token) for tag in (_OPENING, _CLOSING))


def captions_of(replies: Sequence[Reply], *, max_length: int) -> tuple[Caption, ...]:
    """Return the captions among the candidates for one clip, in order.

    Raises:
        AnswerError: none of them is a caption; the error is that of the first.
    """
    captions, first_error = [], None
    for reply in replies:
        try:
            captions.append(caption_of(reply, max_length=max_length))
        except AnswerError as error:
            first_error = first_error or error
    if first_error is not None and not captions:
        raise first_error
    return tuple(captions)


def ranked(captions: Sequence[Caption]) -> tuple[Caption, ...]:
    """Return captions by log-probability, those without one last."""
    return tuple(sorted(captions, key=lambda each: (math.isnan(each.logprob), -each.logprob)))


def caption_of(reply: Reply, *, max_length: int) -> Caption:
    """Return the caption in a reply, without the text in which the model thinks.

    Log-probabilities that the reply does not have are NaN.

    Args:
        reply: the reply.
        max_length: maximum number of tokens that was asked for.

    Raises:
        AnswerError: it is not a caption: blocked, refused, cut, empty, too long, or a call of a tool.
    """
    text, finish = reply.text or "", reply.finish.casefold()
    if finish in _BLOCKED:
        problem = f"a filter of the server blocked the answer (finish reason {reply.finish})"
        raise AnswerError("blocked", problem, remedy="use another model or --prompt for this video")
    if reply.refusal.strip():
        raise _refusal(reply.refusal)
    if reply.called_tool or finish in _TOOL:
        problem = "the model called a tool instead of answering"
        raise AnswerError("invalid", problem, remedy="turn off the tools of the server")
    if finish in _BROKEN_OFF:
        problem = f"the server broke off the answer (finish reason {reply.finish})"
        raise AnswerError("invalid", problem, remedy="run the command again")
    start = _answer_start(text)
    if finish in _CUT:
        thinking = " while the model was thinking" if text.strip() and not text[start:].strip() else ""
        problem = f"the answer was cut at --max-length {max_length}{thinking}"
        raise AnswerError("truncated", problem, remedy="use a greater --max-length, or ask for less")
    if not any(map(str.isalnum, text[start:])):
        problem = "the model only thought and did not answer" if start else "the model's answer is empty"
        raise AnswerError("empty", problem, remedy="change --prompt")
    if len(text) - start > MAX_CHARACTERS:
        problem = f"the answer has {len(text) - start} characters"
        raise AnswerError("invalid", problem, remedy="use another model")
    if is_refusal(text[start:]):
        raise _refusal(text[start:])
    return _scored(text, start, reply)


def _refusal(words: str) -> AnswerError:
    words = " ".join(words[:1000].split())
    words = words if len(words) <= _QUOTED else f"{words[:_QUOTED]}..."
    remedy = "use another model or --prompt for this video"
    return AnswerError("refusal", f"the model refused: {words}", remedy=remedy)


def _answer_start(text: str) -> int:
    """Return where the answer begins, after the last closing tag; the end if thinking does not end."""
    start = max((match.end() for match in _CLOSING.finditer(text)), default=0)
    return len(text) if _OPENING.search(text, start) else start


def _scored(text: str, start: int, reply: Reply) -> Caption:
    """Return the caption ``text[start:]``, each token counted to the last word that it ends in."""
    words = [(match.start(), match[0]) for match in re.compile(r"\S+").finditer(text, start)]
    finite = bool(reply.logprobs) and all(map(math.isfinite, reply.logprobs))
    if not finite or not reply.ends:
        total = sum(reply.logprobs) if finite and not start else math.nan
        scores = [math.nan] * len(words)
    else:
        skipped = sum(end <= start for end in reply.ends) if start else 0  # thinking
        total, scores, number = sum(reply.logprobs[skipped:]), [0.0] * len(words), 0
        for end, logprob in zip(reply.ends[skipped:], reply.logprobs[skipped:], strict=False):
            while number + 1 < len(words) and words[number + 1][0] < end:
                number += 1
            scores[number] += logprob
    scored = [WordScore(word=word, logprob=score) for (_, word), score in zip(words, scores, strict=True)]
    return Caption(text=" ".join(word for _, word in words), logprob=total, words=tuple(scored))


# Refusals

_MAX_REFUSAL = 500  # characters
# Somebody speaks in the video, and the answer says so.
_REPORTED = re.compile(
    r'["“”„«»「」『』]|\b(?:he|she|they|says?|said|sings?|sang|tells?|told|replies|asks?|shouts?)\b', re.I
)
# Sentences after a refusal address the user; a sentence that describes the video does not.
_ADDRESS = re.compile(
    r"\b(?:i|i'm|i'll|i'd|me|my|you|your|please|let|ich|mir|ihnen|dir|bitte|je|vous|puedo|usted|por favor"
    r"|posso|você|я|мне|вам|вас|пожалуйста|(?:ayud|aid|aiut|ajud|help|hilf|помо)\w+)\b"
    r"|[我您你请請]|ください|お手伝い|お気軽|주세요|도와|도움|مساعد|يمكن",
    re.I,
)
_MEDIA = r"(?:videos?|images?|frames?|pictures?|photos?|clips?|scenes?|footage|content|files?|attachments?)"
# For each language: an apology, or the word that a sentence in the first person begins with; and what the
# model says that it does not do.
_REFUSALS = (
    (
        r"(?:i'?m |i am |we'?re |we are )?(?:very |so |truly |really )?(?:sorry|afraid)|my apologies"
        r"|(?:i|we) apologi[sz]e|apologies|unfortunately|(?=i\b|we\b|as an? )",
        r"(?:but |that |however,? )*(?:as an? [^.,]{2,40}, ?)?(?:i|we) ?(?:"
        r"(?:can(?:no|')?t|can not|won't|will not|must decline to|have to decline to"
        r"|(?:'m|'re|am|are) ?(?:not able|unable|not allowed|not permitted) to"
        r"|(?:'m|'re|am|are) ?not comfortable(?: with)?|(?:won't|will not) be able to) (?:"
        r"(?:help|assist)(?:ing)?(?: you)?(?: (?:with|in|on) [^.!?,]*)?(?=[.!?,]|$)"
        r"|(?:comply|fulfill?|answer|respond|engage|process|identify|analy[sz]e|provid|generat|creat|describ"
        r"|see|view|watch|access|open|play|look at|interpret)\w*(?: [^.!?,]*)?"
        rf"\b(?:this|that|these|{_MEDIA}|requests?|questions?|descriptions?|captions?|people|individuals?)\b)"
        rf"|(?:don't|do not) (?:see|have) [^.!?,]*\b(?:{_MEDIA})\b)",
    ),
    (
        r"(?:es )?tut mir (?:sehr )?leid|entschuldig(?:e|en sie|ung)|leider|ich bedaure?|(?=ich\b)",
        r"(?=[^.!?,]*\bich\b)(?=[^.!?,]*\b(?:nicht|kein\w*)\b)[^.!?,]*\b(?:kann|darf|möchte|bin)\b[^.!?,]*"
        r"(?:helfen|beantworten|beschreiben|unterstützen|behilflich|erfüllen|bearbeiten|bereitstellen)",
    ),
    (
        r"(?:je suis )?(?:vraiment )?désolée?|malheureusement|je m'excuse|pardon|je regrette|(?=je )",
        r"(?:mais )?je ne (?:peux|puis|saurais|suis)[^.!?,]*"
        r"(?:aider|répondre|décrire|assister|fournir|satisfaire|traiter|donner suite)",
    ),
    (
        r"lo siento(?: mucho)?|disculp[ae]|perd[oó]n|lamentablemente|lo lamento|me temo|(?=no )",
        r"(?:pero |que )*(?:yo )?no (?:puedo|podemos|me es posible|soy capaz)[^.!?,]*"
        r"(?:ayudar|responder|describir|asistir|proporcionar|cumplir|procesar|atender)",
    ),
    (
        r"mi dispiace|scusa(?:mi|te)?|purtroppo|sono spiacente|(?=non )",
        r"(?:ma )?non (?:posso|possiamo|sono in grado)[^.!?,]*"
        r"(?:aiutar|descrivere|rispondere|assister|fornire|soddisfare)",
    ),
    (
        r"desculp[ae]|sinto muito|lamento|infelizmente|(?=eu |não )",
        r"(?:mas )?(?:eu )?não (?:posso|consigo|podemos|sou capaz)[^.!?,]*"
        r"(?:ajud|descrever|responder|fornecer|auxiliar|atender)",
    ),
    (
        r"извините|простите|прошу прощения|к сожалению|мне (?:очень )?жаль|(?=я )",
        r"(?:но )?я не (?:могу|смогу|в состоянии)[^.!?,]*(?:помочь|описать|ответить|выполнить|предоставить)",
    ),
    (
        r"我?(?:很|非常|十分|真的)?(?:抱歉|遗憾|遺憾)|(?:很)?(?:对不起|對不起)|(?=我)",
        r"(?:但是?|不过)?,?我?们?(?:不能|无法|無法|不可以|没法|没有办法)[^.!?。,]*"
        r"(?:帮|幫|协助|協助|回答|描述|提供|满足|滿足|处理|處理|完成|识别)",
    ),
    (
        r"(?:大変|誠に)?申し訳(?:ありません|ございません|ない)(?:が|けど)?|すみません(?:が)?|ごめんなさい"
        r"|恐れ入りますが|残念ながら",
        r"[^.!?。]*(?:手伝|応え|答え|対応|説明|支援|協力|提供)[^.!?。]*"
        r"(?:できません|できかねます|出来ません|いたしかねます)",
    ),
    (
        r"(?:정말 |대단히 )?죄송(?:합니다|하지만|해요)만?|미안(?:합니다|해요|하지만)만?|유감스럽게도",
        r"[^.!?]*(?:도와|도움|답변|설명|제공|응답|처리|지원)[^.!?]*(?:없습니다|없어요|어렵습니다|못합니다)",
    ),
    (
        r"عذر[اً]+|آسف|أعتذر|للأسف|نأسف|(?=لا )",
        r"(?:و?لكن(?:ني)? )?(?:أنا )?لا (?:أستطيع|يمكنني|يمكننا)[^.!?،]*(?:مساعد|وصف|تقديم|إجابة|الرد)",
    ),
)
_REFUSAL = re.compile(
    "|".join(
        rf"(?:{apology})[\s,.!;:。、،\u2013\u2014-]*(?:{inability})" for apology, inability in _REFUSALS
    ),
    re.I,
)


def is_refusal(answer: str) -> bool:
    """Return whether a complete answer says that the model does not answer, in one of eleven languages.

    Errs on the side of captions: an answer that reports what somebody says is none, nor is one that goes on
    to describe the video.
    """
    answer = unicodedata.normalize("NFKC", answer[: 2 * _MAX_REFUSAL]).replace("\u2019", "'")
    answer = " ".join(answer.strip(" \n*_").split())
    match = _REFUSAL.match(answer)
    if match is None or len(answer) > _MAX_REFUSAL or _REPORTED.search(answer):
        return False
    _, *further = re.split("[.!?。]", answer[match.end() :])
    return all(_ADDRESS.search(sentence) for sentence in further if sentence.strip())
