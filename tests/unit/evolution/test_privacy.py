"""Redaction."""

from __future__ import annotations

import io
import json
import re
import string
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from stdnum import luhn

from pixelis.evolution.privacy import (
    MAX_CHARS,
    clean_png,
    is_redacted,
    pseudonym,
    redact,
    redact_record,
    risk,
)
from pixelis.evolution.privacy_patterns import MARK
from pixelis.records import (
    Action,
    Annotations,
    Exchange,
    Experience,
    Feedback,
    ImageView,
    Media,
    Observation,
    Question,
    Trajectory,
    Turn,
    Verdict,
    Vote,
)

PERSONAL = {
    "EMAIL": ["john.doe@example.com", "j+d_x@mail.example.co.uk", "jörg@müller.de", "A.B@X.IO"],
    "PHONE": [
        "+1 415-555-2671", "+14155552671", "(415) 555-2671", "415-555-2671", "415.555.2671",
        "020 7946 0958", "06 12 34 56 78", "+33 6 12 34 56 78", "+49 (171) 1234567",
    ],
    "SSN": ["078-05-1120", "219-09-9999"],
    "CREDIT_CARD": [
        "4111 1111 1111 1111", "4111-1111-1111-1111", "5555555555554444", "378282246310005",
        "3782 822463 10005",
    ],
    "IP": [
        "192.168.10.20", "10.0.0.255", "2001:0db8:85a3:0000:0000:8a2e:0370:7334",
        "fe80::1ff:fe23:4567:890a",
    ],
    "MAC": ["00:1A:2B:3C:4D:5E", "00-1a-2b-3c-4d-5e", "12:34:56:78:90:12"],
    "URL": [
        "https://www.linkedin.com/in/johndoe", "github.com/jdoe", "http://example.org/~jdoe/index.html",
        "https://example.com/users/jdoe", "https://jdoe:pw@example.com/x",
    ],
    "HANDLE": ["@john_doe", "@jane.doe"],
    "BANK_ACCOUNT": ["DE89 3704 0044 0532 0130 00", "GB82WEST12345698765432"],
    "AWS_KEY": ["AKIAIOSFODNN7EXAMPLE"],
    "API_KEY": [
        "sk-proj-abcdEFGH1234567890abcd", "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "hf_abcdefghij1234567890KLMNOP", "xoxb-123456789012-abcdefGHIJKL",
        "AIzaSyA1234567890abcdefghijklmnopqrstuv",
    ],
}  # fmt: skip

IN_CONTEXT = {
    "PHONE": ["phone: 5551234567", "Tel. 555 1234", "mobile number is 07700900123", "fax=+49 30/901820"],
    "SSN": ["SSN 078051120", "social security number: 078 05 1120"],
    "BIRTH_DATE": [
        "DOB: 03/04/1985", "born on March 5, 1990", "date of birth 1985-04-03", "born 5th of May 1990",
    ],
    "BANK_ACCOUNT": ["account number: 123456789", "acct # 0012345678", "sort code 12-34-56"],
    "PASSPORT": ["Passport No: X1234567", "passport 123456789", "passport number is AB123456"],
    "DRIVER_LICENCE": ["driver's license: D123-4567-8901", "driving licence no. 99999 12345"],
    "MEDICAL_RECORD": ["MRN: 12345678", "medical record number A-123456", "patient id 4711-0815"],
    "IP": ["ip address: 8.8.8.8"],
    "AWS_KEY": ["aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"],
    "API_KEY": [
        "password: hunter2", "api_key=abcdef1234567890abcdef",
        "Authorization: Bearer abc.def-1234567890", "the password is s3cret!",
    ],
}  # fmt: skip

LABELLED = {
    "PHONE": [
        '{"phone": "5551234567"}', '"mobile_phone_number": "07700900123"', "- **Phone:** 5551234567",
        "phone: 1.415.555.2671",
    ],
    "SSN": ["SSN: **078051120**", '{"social_security_number": "078051120"}'],
    "BIRTH_DATE": [
        '{"date_of_birth": "03/04/1985"}', "**Date of birth:** 03/04/1985", "DOB - 03/04/1985",
        "| DOB | 1985-04-03 |",
    ],
    "BANK_ACCOUNT": [
        '{"account_number": "123456789"}', "de89 3704 0044 0532 0130 00", "gb82west12345698765432 is it",
        "ES91 2100 0418 4502 0005 1332 is that",
    ],
    "PASSPORT": [
        '{"passport_number": "X1234567"}', "**Passport No:** X1234567", "| Passport No | X1234567 |",
    ],
    "DRIVER_LICENCE": ['{"driver_license_number": "D1234567"}'],
    "MEDICAL_RECORD": ['"mrn": "12345678"', '{"patient_id": "4711-0815"}'],
    "API_KEY": ["**Password:** hunter2", "password is **hunter2**", "**api_key:** abcdef1234567890abcdef"],
}  # fmt: skip
"""As JSON, Markdown and tables write them."""

NUMBERS = [
    "12345678901234567890", "1234567890123456", "5551234567", "4155552671", "415 555 2671", "-17", "+5",
    "3+12345678", "+12345678.5", "0.123456789", "0.4111111111111111", "3.14159", "1e-10", "1,234,567",
    "$1,299.99", "100-200-3000", "12:30:45", "2026-11-21T22:00:00Z", "2024-01-15", "03/04/1985", "1/2/3",
    "1.2.3.4", "8.8.8.8", "v10.20.30.40", "version 10.0.19.45", "section 3.14.15.92", "999.999.999.999",
    "1:2:3:4:5:6:7:8", "12-34-56-07-08-09", "001 002 003", "ISBN 978-3-16-148410-0",
    "[0.1, 0.25, 0.5, 0.75]", "120,45,300,80 total 42",
    '{"name": "zoom_in", "arguments": {"bbox_2d": [4111, 1111, 1111, 1111], "target": "img0"}}',
    "born in 1990", "passport is required", "Which password is written on the note?", "tokens: 128",
    "5 @ 3.50", "a[12::345]", "127.0.0.1", "@torch.compile(mode='default')", "4111 1111 1111 1112",
    "000-12-3456", '{"label": "cell phone", "score": 0.98765432, "box": [1234567, 2]}',
    '{"cell phone": 0.98765432}', '"phone": [120, 45, 300, 800]', "phone_20240115.jpg",
    "passport_20240115.jpg", "| Name | Password | Email |", "no passport. 1234567 people",
]  # fmt: skip


@pytest.mark.parametrize(("category", "value"), [(c, v) for c, values in PERSONAL.items() for v in values])
def test_each_category_is_redacted_anywhere_in_a_text(category, value):
    for text in (value, f"It says {value}.", f"({value})", f"a\n{value}\nb"):
        cleaned = redact(text)
        assert f"[{category}_" in cleaned
        assert value not in cleaned
        assert redact(cleaned) == cleaned


@pytest.mark.parametrize(("category", "text"), [(c, t) for c, texts in LABELLED.items() for t in texts])
def test_labelled_data_of_json_markdown_and_tables_is_redacted(category, text):
    cleaned = redact(text)
    assert f"[{category}_" in cleaned
    assert not re.search(r"\d", re.sub(MARK, "", cleaned))
    assert redact(cleaned) == cleaned


@pytest.mark.parametrize(("category", "text"), [(c, t) for c, texts in IN_CONTEXT.items() for t in texts])
def test_words_before_a_number_make_it_personal(category, text):
    cleaned = redact(text)
    assert f"[{category}_" in cleaned
    assert not any(character.isdigit() for character in cleaned[: cleaned.index("[")])
    assert redact(cleaned) == cleaned


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_places_times_and_operations_stay(text):
    assert redact(text) == text
    assert redact(f"The answer is {text} here") == f"The answer is {text} here"


@settings(max_examples=300, deadline=None)
@given(st.integers(-(10**30), 10**30))
def test_an_integer_is_changed_only_if_it_is_a_card(number):
    if not (13 <= len(str(abs(number))) <= 19 and luhn.is_valid(str(abs(number)))):
        assert redact(str(number)) == str(number)


FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=150, deadline=None)
@given(st.lists(FLOATS | st.integers(-9999, 99999), min_size=1, max_size=8))
def test_decimals_coordinates_and_json_are_never_changed(numbers):
    for text in (
        json.dumps(numbers),
        json.dumps({"op": "zoom_in", "box": numbers}),
        ",".join(map(str, numbers)),
    ):
        assert redact(text) == text


VALUES = [
    value for table in (PERSONAL, IN_CONTEXT, LABELLED) for values in table.values() for value in values
]
MARKS = ["[EMAIL_", "[EMAIL_123456]", "_000000]", "@", "+", "-", "]", "[", " ", "\n", "phone ", "password: "]
PIECES = st.sampled_from([*VALUES, *NUMBERS, *MARKS])


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES | st.text(string.printable, max_size=6), max_size=12).map("".join))
def test_redacting_again_changes_nothing(text):
    cleaned = redact(text)
    assert redact(cleaned) == cleaned
    assert len(cleaned) <= MAX_CHARS


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 60), PIECES, st.sampled_from(["x", " ", "7", "é"]), st.integers(0, 400))
def test_a_cut_text_ends_with_no_split_mark(before, piece, filler, after):
    text = filler * (MAX_CHARS - before) + " " + piece + " " + filler * after
    cleaned = redact(text)
    assert len(cleaned) <= MAX_CHARS
    assert redact(cleaned) == cleaned


@pytest.mark.parametrize(
    "unit",
    ["a", "1", "a@", "1-", "1 ", "a.", "@a.", "+1", "a/", "[EMAIL_", "0 1", ":a", "(", ("-----BEGIN PRIVATE " "KEY-----"),
     "password: ",
     "https://a/", "http://a@", "eyJa.eyJ", "token=", "sk-", "1.", "AB12 ", "A0", "account no ", "'", "%", "4 ", "+1 (", "born ",
     "phone", "phone ", 'phone": ', "phone *|", "passport_number ", "ab12 ", "a12", "0 ", ("password**: " "*"), "born is ",
     "x.com/", "1:", "::", "é", "\x00", "😀", "\ud800"],
)  # fmt: skip
def test_no_text_is_slow(unit):
    text = (unit * 20_000)[:20_000]
    started = time.process_time()
    redact(text)
    redact(text[:9_000] + "@")
    assert time.process_time() - started < 2.0  # each takes some 10 ms; what backtracks takes minutes


def test_a_text_that_changes_in_every_round_becomes_one_mark():
    text = "+1234561.2.3.4+49 (171) 12345671" * 200
    cleaned = redact(text)
    assert cleaned.startswith("[TEXT_")
    assert redact(cleaned) == cleaned
    assert is_redacted(cleaned)
    assert risk(text).counts == {"TEXT": 1}


def test_marks_link_the_same_value():
    one, two = redact("a@b.org"), redact("Ask A@B.ORG please")
    assert one in two
    assert redact("a@c.org") != one
    assert redact("+1 415-555-2671") == redact("+1 (415) 555 2671")


def test_pseudonyms():
    assert pseudonym("alice") == "2bd806c97f0e00af"  # the first 16 hex digits of sha256
    assert len(pseudonym("")) == 16


@pytest.mark.parametrize(
    ("text", "score", "level"),
    [
        ("how many cats are there? 42", 0, "low"),
        ("see @john_doe", 1, "low"),
        ("mail a@b.org or c@d.org", 10, "medium"),
        ("078-05-1120 219-09-9999 4111111111111111 AKIAIOSFODNN7EXAMPLE GB82WEST12345698765432", 50, "high"),
    ],
)
def test_risk(text, score, level):
    result = risk(text)
    assert (result.score, result.level) == (score, level)
    assert risk(redact(text)).score == 0


def test_png_has_pixels_and_nothing_else():
    rng = np.random.default_rng(0)
    for shape in ((5, 7), (5, 7, 3), (5, 7, 4)):
        view = rng.integers(0, 256, shape, dtype=np.uint8)
        data = clean_png(view[:, ::-1])
        with Image.open(io.BytesIO(data)) as image:
            assert np.array_equal(np.asarray(image), view[:, ::-1])
            assert not image.info
        assert not any(chunk in data for chunk in (b"tEXt", b"iTXt", b"eXIf", b"iCCP", b"tIME"))


SECRET = "john.doe@example.com"


def served(secret: str = SECRET) -> Experience:
    """An experience that says ``secret`` wherever text can stand."""
    view, box = ImageView(id="img0", uri="data:image/png;base64,AAAA", view_size=(8, 8)), [0.1, 0.2, 0.3, 0.4]

    def line(text: str, word: str) -> dict:
        return {"text": text, "confidence": 0.9, "box": box, "words": [{"text": word, "box": [0, 0, 1, 1]}]}

    read, total = line(f"mail {secret}", secret), line("total 12.50", "total")
    mask = {"size": [480, 640], "counts": "@abc_def@ghi.jkl"}
    data = {"op": "read_text", "lines": [read, total], "mask": mask, "num_lines": 2}
    text = f"10,20,30,40 {secret}"
    reading = Turn(
        role="assistant",
        text=f'<think>it is {secret}</think><tool_call>{{"name": "read_text"}}</tool_call>',
        tokens=[4, 5],
        log_probs=[-0.1, -0.2],
        action=Action(op="read_text", arguments={"box": box, "hint": secret}),
        observation=Observation(status="ok", id="obs1", text=text, images=[view], data=data),
    )
    turns = [
        Turn(role="user", text="What does it say?", tokens=[1, 2, 3]),
        reading,
        Turn(role="tool", text=text, tokens=[6], error=f"no {secret}"),
        Turn(role="assistant", text="<answer>12.50</answer>", tokens=[7, 8], log_probs=[-0.3, -0.4]),
    ]
    asked = Exchange(question=f"Whose address is {secret}?", answer=f"{secret} is Alice's", media=["img0"])
    picture = Media(id="img0", uri=f"/home/{secret}/a.png")
    question = Question(
        id="q1",
        question=f"Is {secret} there?",
        history=[asked],
        answers=[secret],
        media=[picture, Media(id="vid0", kind="video", frames=["data:image/png;base64,A"])],
        meta={"note": secret, "n": 3},
        annotations=Annotations(captions=[secret]),
    )
    verdict = Verdict(
        answer=secret,
        confidence=0.75,
        strategy="ensemble",
        votes=[Vote(answer=secret, weight=0.5), Vote(answer="12.50")],
        self_answer=secret,
        answer_weights={secret: 0.5, secret.upper(): 0.25, "12.50": 0.25},
        strategies={"majority": secret, "confidence": None},
    )
    seen = {"question_id": "q1", "images": [view], "answer": secret, "rewards": {"accuracy": 1.0}}
    return Experience(
        question=question,
        trajectory=Trajectory(turns=turns, **seen),
        verdict=verdict,
        policy_version=3,
        created_at=1.5,
        user="alice",
        feedback=[Feedback(correct=False, answer=secret, comment=f"ask {secret}")],
    )


@pytest.mark.parametrize("secret", [SECRET, "(415) 555-2671", "4111 1111 1111 1111"])
def test_no_text_of_an_experience_holds_the_secret(secret):
    cleaned = redact_record(served(secret))
    written = cleaned.model_dump_json()
    assert secret not in written
    assert secret.casefold() not in written.casefold()
    assert "data:" not in written
    assert "/home" not in written
    repeated = Experience.model_validate_json(written)
    assert repeated == cleaned
    assert redact_record(repeated) == repeated


def test_numbers_masks_and_untouched_turns_of_an_experience_stay():
    before, after = served(), redact_record(served())
    assert after.user == pseudonym("alice")
    assert after.question.annotations is None
    assert after.question.meta["n"] == 3
    assert after.question.history[0].question.startswith("Whose address is [EMAIL_")
    assert after.question.history[0].media == ["img0"]
    assert is_redacted(after.question.model_copy(update={"question": "And now?"}).conversation)
    first, second, third, last = after.trajectory.turns
    assert (first, last) == (before.trajectory.turns[0], before.trajectory.turns[3])
    assert second.tokens == second.log_probs == third.tokens == []  # they would spell it
    assert second.action.arguments["box"] == [0.1, 0.2, 0.3, 0.4]
    data = second.observation.data
    assert data["lines"][0]["box"] == [0.1, 0.2, 0.3, 0.4]
    assert data["lines"][0]["words"] == []
    assert data["lines"][1]["words"] == [{"text": "total", "box": [0, 0, 1, 1]}]
    assert data["mask"] == {"size": [480, 640], "counts": "@abc_def@ghi.jkl"}
    assert third.text.startswith("10,20,30,40 [EMAIL_")
    assert after.verdict.confidence == 0.75
    assert sum(after.verdict.answer_weights.values()) == pytest.approx(1.0)
    assert len(after.verdict.answer_weights) == 2
    assert after.verdict.votes[1].answer == "12.50"
    assert [medium.uri for medium in after.question.media] == ["stored:img0", "stored:vid0"]
    assert after.trajectory.rewards == {"accuracy": 1.0}
    assert before.trajectory.turns[1].tokens == [4, 5]  # a copy: nothing of the original changed


def test_keys_of_a_callers_data_are_redacted_and_cut():
    data = {
        "metadata": {SECRET: "a", "x" * 20_000: "b"},
        "text": {"format": {"schema": {"properties": {SECRET: {}}}}},
    }
    data["metadata"] |= {"size": SECRET, "counts": "no mask"}
    cleaned = redact_record(served().model_copy(update={"response": data})).response
    assert SECRET not in str(cleaned)
    assert max(map(len, cleaned["metadata"])) == MAX_CHARS
    assert len(cleaned["text"]["format"]["schema"]["properties"]) == 1


def test_an_experience_without_personal_data_keeps_its_tokens():
    plain = served("nobody")
    cleaned = redact_record(plain)
    assert cleaned.trajectory.token_ids() == plain.trajectory.token_ids()
    assert cleaned.verdict == plain.verdict
