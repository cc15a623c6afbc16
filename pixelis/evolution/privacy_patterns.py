"""Patterns of fifteen categories of personal data, with a check where a pattern alone is too broad.

All repetitions are bounded, so that no text takes long. The group ``value`` is replaced.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

from stdnum import iban, luhn

Check = Callable[[re.Match[str]], bool]

WEIGHTS = {
    **dict.fromkeys(("EMAIL", "PHONE", "BIRTH_DATE"), 5),
    **dict.fromkeys(("IP", "MAC", "URL", "HANDLE"), 1),
    **dict.fromkeys(
        ("SSN", "CREDIT_CARD", "BANK_ACCOUNT", "PASSPORT", "DRIVER_LICENCE", "MEDICAL_RECORD"), 10
    ),
    **dict.fromkeys(("AWS_KEY", "API_KEY"), 10),
}

CATEGORIES = tuple(WEIGHTS)
MARK = rf"\[(?:{'|'.join(CATEGORIES)}|TEXT)_[0-9a-f]{{6}}\]"

_HOSTS = (
    r"(?:linkedin\.com/in|facebook\.com|instagram\.com|twitter\.com|x\.com|github\.com|gitlab\.com|tiktok\.com|youtube\.com|"
    r"reddit\.com/u(?:ser)?|t\.me|medium\.com|mastodon\.social|threads\.net|pinterest\.com|snapchat\.com/add|vk\.com|"
    r"xing\.com/profile)"
)
_GAP = r"[ \t\"'*|:=#-]{0,8}(?:(?:is|was)\b[ \t\"'*:]{1,5})?"
"""Signs between a label and its value, also of JSON, Markdown and tables."""
_NAMED = rf"(?:[ \t_]{{0,3}}(?:number|no|nr|num|id)\b\.?)?{_GAP}"
"""Text between a word and its number: "passport no. : X"."""

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}\.?"
_DATE = (
    r"(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](?:\d{4}|\d{2})"
    rf"|{_MONTH}[ \t]\d{{1,2}}(?:st|nd|rd|th)?,?[ \t]\d{{4}}|\d{{1,2}}(?:st|nd|rd|th|\.)?[ \t](?:of[ "
    rf"\t])?{_MONTH},?[ \t]\d{{4}})"
)


def _digits(text: str) -> str:
    return "".join(c for c in text if c in "0123456789")


_ISSUERS = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|3[47]\d{13}"
    r"|6(?:011|5\d\d|4[4-9]\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}|3(?:0[0-5]|[68]\d)\d{11}|62\d{14,17}"
)


def _card(match: re.Match[str]) -> bool:
    digits = _digits(match["value"])
    return _ISSUERS.fullmatch(digits) is not None and luhn.is_valid(digits)


def _digit_count(minimum: int, maximum: int = 100) -> Check:
    return lambda match: minimum <= len(_digits(match["value"])) <= maximum


def _ssn(match: re.Match[str]) -> bool:
    digits = _digits(match["value"])
    return (
        digits[:3] not in ("000", "666") and digits[0] != "9" and digits[3:5] != "00" and digits[5:] != "0000"
    )


_VERSION = re.compile(
    r"(?:\bv|version|ver\.?|release|section|chapter|clause|build|rev(?:ision)?\.?|firmware|driver|§)"
    r"[ \t:=#]{0,3}$",
    re.I,
)
_ADDRESS = re.compile(r"\bip(?:v4)?(?:[ \t-]{0,3}addr(?:ess)?)?[ \t:=]{0,3}(?:is[ \t]{1,3})?$", re.I)


def _ipv4(match: re.Match[str]) -> bool:
    octets = match["value"].split(".")
    before = match.string[max(0, match.start() - 24) : match.start()]
    if any(int(o) > 255 or (len(o) > 1 and o[0] == "0") for o in octets) or _VERSION.search(before):
        return False
    if octets[0] == "127" or octets == ["0"] * 4:  # loopback and any address
        return False
    # 1.2.3.4 is a version or a section
    return any(len(o) > 1 for o in octets) or _ADDRESS.search(before) is not None


def _ipv6(match: re.Match[str]) -> bool:
    try:
        ipaddress.IPv6Address(match["value"])
    except ValueError:
        return False
    groups = [group for group in match["value"].split(":") if group]
    # 1:2:3:4:5:6:7:8 is a ratio, 1::200 a slice
    return len(groups) > 3 and any(len(group) > 2 for group in groups)


def _iban(match: re.Match[str]) -> bool:
    return iban.is_valid(match["value"], check_country=False)


def _international(match: re.Match[str]) -> bool:
    value = match["value"]
    count = len(_digits(value))
    if value.count(".") == 1:  # a decimal number with a sign
        return False
    return (8 if re.search(r"[ ().-]", value) else 10) <= count <= 15


def _phone(match: re.Match[str]) -> bool:
    digits = len(_digits(match["value"]))
    # The confidence of a detected phone
    return 7 <= digits <= 15 and not re.match(r"\d\.\d+(?![\d.])", match["value"])


def _secret(match: re.Match[str]) -> bool:
    value = match["value"]
    return any(c.isdigit() for c in value) and any(c.isalpha() for c in value)


def _pattern(
    category: str, pattern: str, check: Check | None = None, flags: int = 0
) -> tuple[str, re.Pattern[str], Check | None]:
    """A mark is the first alternative of every pattern, so that marks are never redacted again."""
    return category, re.compile(f"{MARK}|(?:{pattern})", flags), check


def _labelled(
    category: str, words: str, value: str, check: Check | None = None, end: str = r"(?!\w)"
) -> tuple[str, re.Pattern[str], Check | None]:
    """A value behind ``words`` that tell what it is."""
    return _pattern(category, rf"(?<![A-Za-z])(?:{words})(?P<value>{value}){end}", check, re.I)


_EDGE = r"(?<![\w.])"
_END = r"(?![\w]|[.,-]\d)"

PATTERNS: tuple[tuple[str, re.Pattern[str], Check | None], ...] = (
    # Keys first: parts of them match other patterns.
    _pattern(
        "AWS_KEY",
        r"(?<![A-Za-z0-9])(?P<value>(?:AKIA|ASIA|AROA|AIDA|AGPA|ANPA|ANVA|ABIA|ACCA)[A-Z0-9]{16})(?![A-Za-z0-9])",
    ),
    _pattern(
        "AWS_KEY",
        r"aws_?(?:secret_?)?(?:access_?)?key(?:_?id)?[\"']?[ \t]{0,3}[:=][ \t]{0,3}[\"']?"
        r"(?P<value>[A-Za-z0-9/+=]{40})(?![A-Za-z0-9/+=])",
        flags=re.I,
    ),
    _pattern("API_KEY", r"(?P<value>-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[A-Za-z0-9+/=\s:,-]{0,9000})"),
    _pattern(
        "API_KEY",
        r"(?<![\w-])(?P<value>(?:sk|pk|rk)[-_](?:(?:live|test|proj|ant|or)[-_])?[A-Za-z0-9_-]{16,200}|gh[pousr]_[A-Za-z0-9]{20,200}"
        r"|github_pat_[A-Za-z0-9_]{20,200}|glpat-[A-Za-z0-9_-]{16,100}|hf_[A-Za-z0-9]{20,100}|xox[abprs]-[A-Za-z0-9-]{10,200}"
        r"|AIza[A-Za-z0-9_-]{30,60}|SG\.[A-Za-z0-9_-]{16,64}\.[A-Za-z0-9_-]{16,64}"
        r"|eyJ[A-Za-z0-9_-]{8,2000}\.eyJ[A-Za-z0-9_-]{4,4000}\.[A-Za-z0-9_-]{4,1000})",
        _secret,
    ),
    _pattern("API_KEY", r"(?<![\w])bearer[ \t]{1,3}(?P<value>[A-Za-z0-9._~+/=-]{16,2000})", _secret, re.I),
    _pattern(
        "API_KEY",
        r"(?:api[ _-]?key|secret(?:[ _-]?key)?|access[ _-]?token|auth[ _-]?token|token)"
        r"[\"'*]{0,3}[ \t]{0,3}[:=][ \t\"'*]{0,5}(?P<value>[A-Za-z0-9_+/=.-]{16,500})",
        _secret,
        re.I,
    ),
    _labelled(
        "API_KEY",
        r"(?:password|passwd|pwd|passphrase|passcode)[\"'*]{0,3}[ \t]{0,3}(?:[:=]|(?P<is>is\b))[ \t\"'*]{0,5}",
        r"[^\s\"'\[\]<>{},;]{4,100}",
        # "which password is written here?"
        lambda match: not (match["is"] and match["value"].strip(".?!:*").isalpha()),
        end="",
    ),
    _pattern("URL", r"(?P<value>(?:https?|ftp)://[^\s/@\[\]<>\"']{1,100}@[^\s\[\]<>\"']{1,300})", flags=re.I),
    _pattern("EMAIL", r"(?P<value>[\w.+%'-]{1,64}@(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,24})(?![\w-])"),
    _pattern(
        "URL",
        rf"(?<![\w.@-])(?P<value>(?:https?://)?(?:(?:www|m|mobile|[a-z]{{2}})\.)?{_HOSTS}/@?[\w.%-]{{2,100}}(?:/[\w.%/?=&#-]{{0,200}})?)",
        flags=re.I,
    ),
    _pattern(
        "URL",
        r"(?P<value>https?://[^\s/\[\]<>\"']{1,200}/(?:[^\s/\[\]<>\"'~]{1,60}/){0,3}(?:~|users?/|u/|profiles?/|people/|home/)"
        r"[\w.%-]{2,100}[^\s\[\]<>\"']{0,200})",
        flags=re.I,
    ),
    _pattern(
        "HANDLE",
        r"(?<![\w@])(?P<value>@[A-Za-z_][A-Za-z0-9_]{1,29}(?:\.[A-Za-z0-9_]{1,20}){0,2})(?![\w@(]|\.\w)",
    ),
    _labelled(
        "BIRTH_DATE",
        r"(?:d\.?o\.?b\.?|birth[ \t_-]?date|birthday|birth|born(?:[ \t]on)?|geburtsdatum|geb\.)"
        rf"{_GAP}(?:the[ \t])?",
        _DATE,
    ),
    _labelled(
        "MEDICAL_RECORD",
        rf"(?:mrn|medical[ \t_]record|patient[ \t_](?:id|number|no)|health[ \t_]record){_NAMED}",
        r"[A-Z]{0,4}-?\d[\dA-Z-]{3,18}",
        _digit_count(4),
    ),
    _labelled("PASSPORT", f"passport{_NAMED}", r"[A-Z]{0,3}\d[\dA-Z]{4,10}", _digit_count(4)),
    _labelled(
        "DRIVER_LICENCE",
        rf"(?:driv(?:er|ing)(?:['’]?s)?[ \t_]licen[cs]e|dl[ \t_]?(?:no\b\.?|number|\#)){_NAMED}",
        r"[A-Z]{0,5}-?\d(?:[ -]?[A-Z]?\d){4,16}",
        _digit_count(4),
    ),
    _pattern(
        "BANK_ACCOUNT",
        r"(?<![A-Za-z0-9])(?P<value>[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?)(?![A-Za-z0-9])",
        _iban,
    ),
    # In lower case with digits alone after the bank's code: words after the number would seem a part of it
    _pattern(
        "BANK_ACCOUNT",
        r"(?<![A-Za-z0-9])(?P<value>[a-z]{2}\d{2}(?: ?[a-z]{4})?(?: ?\d{4}){2,7}(?: ?\d{1,3})?)(?![A-Za-z0-9])",
        _iban,
    ),
    _labelled(
        "BANK_ACCOUNT",
        r"(?:(?:bank[ \t_])?(?:account|acct|a/c)(?:[ \t_](?:number|no|nr|num)\b\.?|[ \t]?\#)"
        rf"|routing[ \t_](?:number|no)|sort[ \t_]code|iban|bank[ \t_]account|konto(?:nummer)?){_GAP}",
        r"\d(?:[ -]?\d){5,19}",
        _digit_count(6, 18),
        end=r"(?![\w]|\.\d)",
    ),
    _pattern("SSN", r"(?<![\w.+-])(?P<value>\d{3}-\d{2}-\d{4})(?![\w-]|\.\d)", _ssn),
    _labelled(
        "SSN",
        rf"(?:ssn|social[ \t_]security){_NAMED}",
        r"\d{3}[ -]?\d{2}[ -]?\d{4}",
        _ssn,
        end=r"(?![\w]|\.\d)",
    ),
    _pattern(
        "CREDIT_CARD",
        rf"{_EDGE}(?<!\d[,-])(?P<value>\d{{13,19}}|\d{{4}}([ -])\d{{4}}\2\d{{4}}\2\d{{4}}(?:\2\d{{1,3}})?"
        rf"|3\d{{3}}([ -])\d{{6}}\3\d{{4,5}}){_END}",
        _card,
    ),
    _pattern(
        "PHONE",
        r"(?<![A-Za-z_])(?:tel(?:ephone|efon)?|phone|(?:mobile|cell)(?:[ \t_]?phone)?|fax|whatsapp|sms|handy)"
        r"(?:\b\.?|(?=_(?:number|no|nr)\b))(?:[ \t_]{0,3}(?:number|no|nr)\b\.?)?"
        rf"{_GAP}(?P<value>\+?\(?\d(?:[ ()./-]{{0,2}}\d){{6,14}})(?![\w]|[.,]\d)",
        _phone,
        re.I,
    ),
    _pattern(
        "PHONE",
        r"(?<![\w.+-])(?P<value>\+\d{1,3}(?:[ .-]?\(?\d{1,5}\)?){2,6})(?![\w]|[.,]\d)",
        _international,
    ),
    _pattern(
        "PHONE",
        rf"(?<![\w.+,-])(?P<value>(?:\+?1[ .-])?(?:\([2-9]\d{{2}}\)[ -]?\d{{3}}[ .-]\d{{4}}"
        rf"|[2-9]\d{{2}}([.-])\d{{3}}\2\d{{4}})){_END}",
    ),
    _pattern(
        "PHONE",
        rf"(?<![\w.+,-])(?P<value>0[1-9]\d{{1,3}}[ /-][1-9]\d{{2,3}}[ -]?\d{{3,5}}){_END}",
        _digit_count(10, 13),
    ),
    _pattern("PHONE", rf"(?<![\w.+,-])(?P<value>0[1-9](?:([ .-])\d{{2}})(?:\2\d{{2}}){{3}}){_END}"),
    _pattern(
        "MAC",
        r"(?<![\w:-])(?P<value>[0-9A-Fa-f]{2}(?:(?::[0-9A-Fa-f]{2}){5}|(?:-[0-9A-Fa-f]{2}){5}))(?![\w:-])",
        # 01-02-03-04-05-06 is a row of numbers
        lambda match: ":" in match["value"] or any(c.isalpha() for c in match["value"]),
    ),
    _pattern("IP", r"(?<![\w.-])(?P<value>\d{1,3}(?:\.\d{1,3}){3})(?![\w]|[.-]\d)", _ipv4),
    _pattern("IP", r"(?<![\w:.])(?P<value>[0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f]{0,4}){3,7})(?![\w:])", _ipv6),
)
