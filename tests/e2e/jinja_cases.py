"""Small templates that jinja2 and tandem must treat alike, failures included.

EXPRESSIONS stand one a line and are put between {{ and }}; TEMPLATES are whole. Both see VARIABLES.
"""

VARIABLES = {
    "s": "Hello World", "t": "  pad\t\n", "u": "Ünïcödé 日本 😀ß", "e": "",
    "q": "it's \"q\"", "nl": "a\nb\r\nc\n\nd",
    "n": 5, "neg": -7, "z": 0, "f": 2.5, "big": 1e20, "uint64": 18446744073709551615,
    "tr": True, "fa": False, "no": None,
    "l": [3, 1, 2], "ls": ["b", "A", "c"], "el": [], "nest": [[1, 2], [3, [4]]],
    "mix": [1, "a", None, 2.0, True, -0.0, 1e-7, 100],
    "ed": {}, "d": {"b": 1, "a": [1, 2], "items": "x", "c": {"k": "v"}},
    "ld": [{"n": "x", "v": 2, "g": "A"}, {"n": "y", "v": 1, "g": "b"},
           {"n": "Z", "v": 3, "g": "a"}],
}

EXPRESSIONS = r'''
1+2*3-4
7//2|string ~ 7%3
-7//2
-7%3
7//-2
7%-3
-7.5//2
7.5%-2
2**10
2**-1
2**3**2
-2**2
10/4
10/5
1/3
0.1+0.2
1e16
1e15
123456789012345678
1.5e300*1e10
1e308*10
-1e308*10
3.0
1e-5
0.0001
100000000000000000000.0
5 if true
5 if false
5 if false else 6
1 if 0 else 2 if 0 else 3
not true
not not 1
1 and 2
0 and 2
0 or 'x'
1 == 1.0
1 == true
'a' == 'a'
1 < 2 < 3
1 < 3 < 2
1 != 2
'a' < 'b'
[1,2] < [1,3]
(1,2) == (1,2)
[1,2] == (1,2)
{'a':1} == {'a':1.0}
1 in [1,2]
3 not in [1,2]
'ell' in s
'a' in d
'zz' in d
1 in d
s[0]
s[-1]
s[100]
s[1:3]
s[::-1]
s[::2]
s[-3:]
s[:-3]
s[5:2]
s[10:1:-2]
u[0:3]
u[::-1]
u[3:10:2]
u[-2:]
u|length
l[0]
l[-1]
l[5]
l[1:]
l[::-1]
l[::2]
l[0:2:1]
nest[1][1][0]
d.b
d['b']
d.a[0]
d.missing
d['missing']
d.c.k
d['items']
d.items()|list
d.keys()|list
d.values()|list
d.get('b')
d.get('zz')
d.get('zz', 9)
d.items()
d.keys()
d.values()
d|length
missing
missing|default('dflt')
e|default('dflt')
e|default('dflt', true)
no|default('x')
no|default('x', boolean=True)
missing is defined
missing is undefined
no is none
s is string
n is number
f is number
tr is number
n is integer
tr is integer
f is float
tr is boolean
tr is true
fa is false
d is mapping
l is mapping
l is sequence
d is sequence
s is sequence
n is sequence
l is iterable
s is iterable
n is iterable
missing is iterable
missing is sequence
missing is callable
range is callable
s.upper is callable
n is odd
n is even
n is divisibleby 5
n is divisibleby(2)
n is eq 5
n is equalto(5)
n is ne 5
n is lt 6
n is gt(4)
n is ge 5
n is le 4
n is in [5]
'a' is in 'abc'
no is sameas none
tr is sameas true
'abc' is lower
'ABC' is upper
'Abc' is lower
'upper' is filter
'nope' is filter
'odd' is test
n is not odd
n is not none
s is not string
s|upper
s|lower
u|upper
u|lower
u|title
u|capitalize
'hello wORLD-foo (bar) [baz] {q} <r> a_b'|title
'hello wORLD-foo (bar)'.title()
"they're bill's".title()
"they're bill's"|title
s|reverse
l|reverse|list
t|trim
'xxaxx'|trim('x')
t.strip()
t.lstrip()
t.rstrip()
'xxaxx'.strip('x')
'xyaxy'.strip('yx')
'a,b,c'.split(',')
'a,b,c'.split(',', 1)
'a,b,c'.rsplit(',', 1)
'  a b  c '.split()
'  a b  c '.split(none, 1)
'  a b  c '.rsplit(none, 1)
''.split()
''.split(',')
nl.splitlines()
nl.splitlines(true)
'a-b-c'.partition('-')
'a-b-c'.rpartition('-')
'abc'.partition('x')
'abc'.rpartition('x')
s.startswith('Hell')
s.startswith(('x','He'))
s.endswith('ld')
s.endswith(('a','b'))
s.startswith('W', 6)
s.endswith('lo', 0, 5)
s.replace('l','L')
s.replace('l','L',1)
s.replace('','-')
s.replace('','-',3)
s|replace('l','L')
s|replace('l','L',count=2)
s.find('o')
s.find('o',5)
s.find('zz')
s.rfind('o')
s.index('o')
s.index('zz')
s.count('l')
s.count('')
u.find('日')
u.rfind('本')
u.count('ö')
'-'.join(['a','b'])
'-'.join(l)
l|join('-')
l|join
ls|join(', ')
ld|join(',', attribute='n')
s.isalpha()
'abc'.isalpha()
'123'.isdigit()
'½'.isnumeric()
'½'.isdigit()
'²'.isdigit()
'²'.isdecimal()
'  '.isspace()
''.isspace()
'abc1'.isalnum()
'Abc'.istitle()
'ABC'.isupper()
'abc'.islower()
'abc'.isascii()
'é'.isascii()
'prefix_x'.removeprefix('prefix_')
'x.txt'.removesuffix('.txt')
'7'.zfill(3)
'-7'.zfill(4)
'a'.ljust(3)~'|'
'a'.rjust(3,'*')
'{} {}'.format(1,'a')
'{0} {1} {0}'.format('a','b')
'{a} {b[0]} {c.k}'.format(a=1,b=[2],c={'k':3})
'{:>5}|{:<5}|{:^5}|'.format('a','b','c')
'{:05d}'.format(42)
'{:,}'.format(1234567)
'{:.2f}'.format(3.14159)
'{:+.1e}'.format(12345.678)
'{:x} {:X} {:#x} {:b} {:o}'.format(255,255,255,5,8)
'{:%}'.format(0.25)
'{!r} {!s}'.format('a','b')
'{:{}}'.format('a', 5)
'{{}}'.format()
'{:.3}'.format('abcdef')
'{:g}'.format(1e10)
'{}'.format(none)
'{:>10}'.format(none)
'{:_}'.format(1234567)
'{:e}'.format(0.0)
'{:.3}'.format(3.14159)
'{:.3}'.format(12345.678)
'{:10.3f}|'.format(2.5)
'{:<10}|'.format(2.5)
'{:c}'.format(65)
'{:d}'.format(true)
'{}'.format(true)
'%s %d %5.2f %r' % ('a', 3, 2.5, 'x')
'%(a)s-%(b)d' % {'a':1,'b':2}
'%s' % 'x'
'%s' % [1,2]
'%05d|%-5d|%+d|% d' % (1,2,3,4)
'%x %X %o %#x' % (255,255,8,255)
'%e %g %G' % (12345.678, 0.00001, 1e20)
'%c%c' % ('a', 66)
'%%' % ()
'%s %s' % ('a',)
'%s' % ('a','b')
'%d' % 'a'
'%d' % 3.99
'%5s|%-5s|' % ('a','b')
'%.2s' % 'abc'
'%i' % 3
'%s'|format('x')
'%s %s'|format('x', 1)
'%(a)s'|format(a=1)
'%a' % 'é'
'%*d' % (5, 42)
l|sort
l|sort(reverse=true)
ls|sort
ls|sort(case_sensitive=true)
ld|sort(attribute='v')|map(attribute='n')|list
ld|sort(attribute='g,v')|map(attribute='n')|list
ld|sort(attribute='n', case_sensitive=true)|map(attribute='n')|join
mix|sort
l|min
l|max
ls|min
ls|max
ld|max(attribute='v')
el|min
el|max is defined
l|sum
ld|sum(attribute='v')
l|sum(start=10)
ls|sum
l|first
l|last
el|first
el|last
s|first
s|last
d|first
d|last
el|first is defined
l|list
s|list
d|list
u|list
[1,1,2,'a','A']|unique|list
[1,1,2,'a','A']|unique(case_sensitive=true)|list
ld|unique(attribute='g')|map(attribute='n')|list
l|map('string')|list
ls|map('upper')|join(',')
ls|map('replace','A','Z')|list
ld|map(attribute='zz')|list
ld|map(attribute='zz', default='q')|list
ld|map(attribute='n')|list
[[1,2],[3,4]]|map(attribute=0)|list
[[1,2],[3,4]]|map('first')|list
l|select('odd')|list
l|reject('odd')|list
l|select|list
[0,1,'',none]|select|list
[0,1,'',none]|reject|list
l|select('gt',1)|list
l|select('>',1)|list
ld|selectattr('v','eq',2)|list
ld|selectattr('v','>',1)|map(attribute='n')|list
ld|selectattr('zz')|list
ld|selectattr('zz','defined')|list
ld|selectattr('zz','undefined')|list|length
ld|rejectattr('v','eq',2)|map(attribute='n')|list
ld|selectattr('g','in',['A','a'])|map(attribute='n')|list
ld|selectattr('v')|length
ld|map('nope')|list
l|select('nope')|list
ld|groupby('g')
ld|groupby('g')|map('first')|list
ld|groupby('g', case_sensitive=true)|map(attribute='grouper')|list
ld|groupby('g')|map(attribute='list')|map('length')|list
d|dictsort
d|dictsort(reverse=true)|map('first')|list
{'a':3,'b':1,'c':2}|dictsort(by='value')
{'a':3,'B':1,'c':2}|dictsort
{'a':3,'B':1,'c':2}|dictsort(true)
d|items|list
missing|items|list
l|items|list
3.7|int
'42'|int
'42.9'|int
'abc'|int
'abc'|int(7)
'0x1F'|int(0,16)
'1F'|int(base=16)
'  12  '|int
'1_000'|int
true|int
none|int
none|int(default=3)
'3.5'|float
'abc'|float
'1e3'|float
'inf'|float
'nan'|float
3|float
3|string
3.0|string
true|string
none|string
l|string
d|string
3.14159|round
3.14159|round(2)
2.5|round
3.5|round
-2.5|round
2.675|round(2)
1234|round(-2)
1250|round(-2)
1350|round(-2)
3.14159|round(1,'ceil')
3.14159|round(1,'floor')
3|round
7|round(0,'ceil')
1e20|int
2.5|round|int
-5|abs
-5.5|abs
'a'|abs
tr|abs
"<a href='x'>&\"</a>"|escape
"<b>"|e
"<b>"|safe
("<b>"|safe) + "<i>"
"<i>" + ("<b>"|safe)
("<b>"|safe) ~ "<i>"
("<b>"|escape)|string
nl|indent
nl|indent(2)
nl|indent(2, true)
nl|indent(2, true, true)
nl|indent('>>')
''|indent
d|tojson
d|tojson(indent=2)
l|tojson
l|tojson(indent=4)
u|tojson
u|tojson(ensure_ascii=true)
q|tojson
mix|tojson
d|tojson(sort_keys=true)
d|tojson(separators=(',',':'))
{1:2,true:3,none:4,2.5:5}|tojson
{(1,2):3}|tojson
[]|tojson(indent=2)
{}|tojson(indent=2)
[[],{},[1]]|tojson(indent=1)
[1.0,1e20,1e-7,1.5]|tojson
"\u0001\u007f\u2028\"\\/\b\f\n\r\t"|tojson
missing|tojson
(1,2)|tojson
range(3)|tojson
(1,2)
(1,)
()
[1,[2,(3,)],{'a':'b'}]
['a',"it's",'"',"'\"",'\n\t\\','é','\x00','\u200b','😀']
{'a':none,'b':true}
{1:'a',(1,2):'b'}
[missing]
range(5)
range(5)|list
range(2,8,3)|list
range(5,0,-2)|list
range(10)[2:8:3]
range(3)[1]
range(3)|length
range(100001)
range(0)|list
5 in range(10)
namespace(a=1).a
namespace(a=1)
namespace({'a':1},b=2).b
namespace(_a=1)
dict(a=1,b=2)
dict([('a',1),('b',2)])
dict({'a':1},b=2)
s.missing
s.missing.more
missing.more
missing['x']
missing + 1
missing ~ 'x'
missing == missing
missing == none
missing < 1
missing()
missing|int
missing|length
missing|upper
missing|join
missing|list
missing|first
missing|last
missing|string
missing|abs
missing|round
missing|sort
missing|sum
missing|map('upper')|list
missing|replace('a','b')
missing|trim
missing|reverse|list
missing in l
'x' in missing
none.x
none['x']
none + 1
1 + 'a'
'a' + 1
[1] + [2]
[1] + (2,)
(1,)+(2,)
'ab' * 3
3 * 'ab'
[1,2]*2
'a' * -1
'a' * 1.5
1 // 0
1 / 0
1 % 0
1.0 / 0
2 ** 62
2 ** 0.5
0 ** -1
9223372036854775807
-9223372036854775807
true + true
true and 'x'
[] or {} or 'z'
l.append(1)
d.update({'x':1})
d.pop('b')
l.sort()
l.append
l.index(2)
l.index(99)
l.count(1)
(1,2,1).count(1)
l.copy()
d.copy()
d.pop is defined
''.join(reversed)
s.__class__
s.__class__ is defined
d.__len__
l.__class__.__mro__
s|attr('upper') is callable
d|attr('b') is defined
ns is defined
loop is defined
'a' 'b' "c"
'a\nb\t\x41\u00e9\101\'\q\é'
0x1F + 0b101 + 0o17
1_000_000
1.5e3
1E5
.5
1.
1..real
foo.0
l.0
nest.1.0
l[true]
l['0']
l['x']
d[none]
d[[1]]
d[1.5]
s['upper']()
s['x']
l[1.0]
l[1,2]
l[1:2,3]
l[a:]
s[none:2]
s['a':]
n.x
f.x
(1 if true else 2) + 3
1 if missing else 2
'yes' if 'a' in 'abc' else 'no'
not 1 in [1]
not (1 == 2)
1 == 1 and 2 == 2
- 5
+5
-'a'
--5
-l
not l
(-5)|abs
-5 is odd
n|string + 'x'
'x' + n|string
n + 1|string
[x for x in l]
lambda x: x
{'a'}
{1:2,}
[1,2,]
(1,2,)
f(x)
s.upper(
s.upper)
s upper
1 +
|upper
s|
s|nope
s is nope
s|upper()
s|upper(1)
s|replace('a')
s|replace(old='l', new='x')
s|replace(zz=1)
s.strip(1)
s.upper(1)
s.split(sep='o')
s.strip(chars='x')
dict(1)
dict(**d)
dict(*[[('a',1)]])
range()
range('a')
range(1.5)
raise_exception('boom')
raise_exception()
strftime_now('%Y-%m-%d')
strftime_now('%d %b %Y')
strftime_now('%H:%M:%S.%f %j %A %B %p')
strftime_now('')
strftime_now('%%')
l is eq [3,1,2]
'a' is eq 'a' and 'b' is eq 'b'
1 is eq 1 if 2 is eq 2 else 3
n is divisibleby 5 and true
n is number is string
[1,2,3] is sequence and [1] is not mapping
s|length > 3
l|length == 3
s.split(' ')[0]
s.split(' ')|last
s|list|length
(s|upper)[0]
s|upper|lower|title
l|map('string')|join('-')|upper
(l|map('string'))|length
l|select|first
l|select is defined
'x' if l|select else 'y'
'x' if el|select else 'y'
el|map('upper')|list
none|map('upper')|list
n|map('upper')|list
none|list
none|length
n|length
none|join
none|upper
n|upper
tr|lower
none|trim
l|upper
l|replace('1','x')
n|replace('5','x')
[1,2]|join(1)
['a',1,none]|join('|')
{'a':1}|join(',')
s|join(',')
d|sort
'cba'|sort
'cba'|sort|join
d|unique|list
[[1],[1]]|unique|list
[none,1]|max
['a',1]|min
[1.5,2,true]|max
['Ab','aa']|max
1.0 == 1
'1' == 1
1 < 'a'
none < 1
[1] < 'a'
none == false
'' == none
0 == false
[] == false
true == 1
1 is sameas 1
'a' is sameas 'b'
d is sameas d
"é" < "z"
"Z" < "a"
'abc' > 'ab'
[1,2,3] > [1,2]
(1,2) > (1,)
10000000000000000000000
5 // 2.0
5 % 2.5
-5 // 2.0
1e400
-1e400
1e400 - 1e400
0.1
1/7
100.0
1e22
123456.789e3
5e-324
1.7976931348623157e308
4.35
0.1 + 0.7
1e5
1e-4
12345678.9
3.0 * 2
7.0 // 2
7 // 2
2 ** 2.0
4 ** -1
'%s' % 1.0
'%d' % 1e10
'%.3f' % 2
'%s' % none
'%s' % true
'%5.1f|' % 3.14159
'{:5}|{:<5}|{:>5}|{:^5}|{:=5}|'.format(42,42,42,42,-42)
'{:*^9}'.format('mid')
'{:+}'.format(5)
'{: }'.format(5)
'{:08.3f}'.format(-3.14159)
'{:.0f} {:.0f}'.format(0.5, 1.5)
'{:s}'.format(5)
'{:d}'.format('a')
'{:d}'.format(1.5)
'{'.format()
'}'.format()
'{0}{}'.format(1,2)
'{2}'.format(1)
'{x}'.format(y=1)
'{a.b}'.format(a=1)
'{0.upper}'.format('a') is string
'{0[0]}'.format('abc')
'{!x}'.format(1)
'{:,.2f}'.format(1234567.891)
'Σας ΣΑΣ ΟΔΥΣΣΕΥΣ'.lower()
'ǆ ß ŉ ﬁ'.title()
'ßﬁŉ'.upper()
'İI'.lower()
'a\u00a0b\u2003c'.split()
'a\u2028b\x0bc\x1cd'.splitlines()
'１２３'.isdigit()
'١٢'.isdecimal()
'日本'.isalpha()
'\u200b'.isprintable()
'a b'.isprintable()
"tab\t"|tojson
s.upper().lower().split('o')|join('0')
"%s"|format(l)
[d.b, d.get('c').k]|join
{'x': {'y': [1,2]}}.x.y[1]
(d.items()|list)[0]
d.items()|first
d.keys()|sort
d.values()|length
'b' in d.keys()
1 in d.values()
('b',1) in d.items()
d.items()|sort|list
d.keys()|join(',')
d.items()|map('first')|join(',')
d.items()|map(attribute=0)|join(',')
s is iterable and s is not mapping
loop
varargs
caller
caller()
true is true
True
None
False
none is none
nan
inf
l|tojson|length
l|tojson(2)
l|tojson(false, 2)
d|tojson(indent='\t')
d|tojson(indent=0)
d|tojson(indent=none)
d|tojson(zz=1)
{'b':1,'a':2}|tojson(true,none,none,true)
'a'|tojson + 'b'
'</script>'|tojson
"é\u2028"|tojson(ensure_ascii=True)
"😀"|tojson(ensure_ascii=True)
"\x7f"|tojson(ensure_ascii=True)
[1,2,3][::-1][0]
l[-1:]
l[:0]
l[-10:10]
s[:100]
s[-100:]
s[::-2]
u[::-3]
()[0]
(1,2)[0]
(1,2)[:1]
(1,2)[5]
range(5)[-1]
range(5)[9]
'a'[0][0][0]
s[l[1]]
l[n-5]
d['b'] + d.a[1]
"a" in ["a"] and "b" not in ["a"]
1 in (1,2)
'' in 'abc'
1 in 'abc'
none in [none]
missing in [missing]
1.0 in [1]
true in [1]
[1] in [[1]]
1 in 5
'b' not in d
'%s' in '%s'
s ~ n ~ f ~ no ~ tr ~ l
1 ~ 2 + 3
1 + 2 ~ 3
2 * 3 ~ 4
'a' ~ ('b' if true)
'a' ~ ('b' if false)
('b' if false) is defined
'x'.join(['a','b','c'])
'x'.join('abc')
'x'.join({'a':1})
'x'.join(d.keys())
'x'.join(l|map('string'))
','.join(5)
('a','b')|join
l|first + l|last
l|first|string
{}|length
{}.items()|list
{} is mapping
[] is sequence
() is sequence
"" is string
0 is number
0 is none
0 is defined
none is defined
'a' is defined
[1,[2,[3]]]|string
{'a':{'b':[1,{'c':2}]}}|string
[true,false,none,1.0,'s']|string
'a' if tr else 'b' if fa else 'c'
(tr and fa) or n
tr and (fa or n)
n if n > 3 and n < 10 else 0
(n > 3) == true
n > 3 == true
l|length * 2
-n
-n + 10
-(n + 10)
+n
n - -n
n*-1
s|default
0|default(5, true)
''|d('x')
''|d('x', true)
missing|d
missing|d(missing2)|d('deep')
d.zz|d('dz')
d.zz.yy|d('dz')
d.c.zz|default(d.b)
'a'|upper|lower ~ 'b'|upper
"\\n"
'\\'
'\\\''
"\""
'\u00e9\U0001F600'
'\ud83d'
'\x4'
'tab	in'
'#}'
'{{'
'}}'
'%}'
'{%'
"a'b"
'a"b'
uint64
uint64|tojson
uint64 + 1.0
uint64 == uint64
uint64 > 5
uint64|int
uint64|string|length
'%d' % uint64
'''.strip("\n").split("\n")

TEMPLATES = [
    "{% for x in l %}{{ x }}{% endfor %}",
    "{% for x in l %}{{ loop.index }}/{{ loop.length }}:{{ x }}{{ ',' if not loop.last }}{% endfor %}",
    "{% for x in el %}a{% else %}empty{% endfor %}",
    "{% for x in l if x > 1 %}{{ loop.index0 }}{{ x }}{{ loop.last }}{% endfor %}",
    "{% for x in l if x > 1 %}{{ loop.length }}{{ loop.revindex }}{% endfor %}",
    "{% for x in l if x > 9 %}{{ x }}{% else %}none{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for (k, v) in d.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for k in d %}{{ k }}{% endfor %}",
    "{% for a, b in [[1,2],[3,4]] %}{{ a+b }}{% endfor %}",
    "{% for a, (b, c) in [(1,(2,3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% for a, b in [[1,2,3]] %}{{ a }}{% endfor %}",
    "{% for a, b in [1] %}{{ a }}{% endfor %}",
    "{% for a, b in ['xy'] %}{{ a }}-{{ b }}{% endfor %}",
    "{% for c in u %}[{{ c }}]{% endfor %}",
    "{% for x in l %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }};{% endfor %}",
    "{% for x in l %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{% endfor %}",
    "{% for x in l %}{{ loop.cycle('a','b') }}{% endfor %}",
    "{% for x in [1,1,2,2,1] %}{{ loop.changed(x) }}{% endfor %}",
    "{% for x in l %}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.depth }}{{ loop.depth0 }}{% endfor %}",
    "{% for x in l %}{% for y in l %}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %}",
    "{% for x in l %}{% set o = loop %}{% for y in ls %}{{ o.index }}{{ loop.index }} {% endfor %}{% endfor %}",
    "{% for x in l %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in l %}{% break %}{% else %}E{% endfor %}",
    "{% for x in l %}{% continue %}{% else %}E{% endfor %}",
    "{% for x in l %}{{ x }}{% if loop.index == 2 %}{% break %}{% endif %}{% else %}E{% endfor %}",
    "{% break %}",
    "{% continue %}",
    "{% for x in l %}{% macro m() %}{% break %}{% endmacro %}{% endfor %}",
    "{% for x in l %}{% set q %}{% break %}{% endset %}{{ x }}{% endfor %}Z",
    "{% for x in l %}{% filter upper %}a{% if loop.first %}{% continue %}{% endif %}b{% endfilter %}{% endfor %}",
    "{% for x in l %}a{% for y in [] %}{% else %}{% break %}{% endfor %}b{% endfor %}",
    "{% for x in nest recursive %}{% if x is iterable %}[{{ loop(x) }}]{% else %}{{ x }}@{{ loop.depth }}{% endif %}{% endfor %}",
    "{% for x in nest recursive %}{{ loop.depth0 }}{% if x is iterable %}[{{ loop(x) }}]{% else %}{{ x }}{% endif %}{% else %}none{% endfor %}",
    "{% for x in l %}{{ loop(x) }}{% endfor %}",
    "{% for x in l recursive if x %}{{ x }}{% endfor %}",
    "{% for x in l if x recursive %}{{ x }}{% endfor %}",
    "{% set x = 1 %}{% for i in l %}{% set x = i %}{{ x }}{% endfor %}{{ x }}",
    "{% set x = 1 %}{% for i in l %}{{ x }}{% set x = i %}{% endfor %}{{ x }}",
    "{% for i in l %}{{ s }}{% set s = i %}{{ s }}{% endfor %}{{ s }}",
    "{% for i in l %}{% if i == 1 %}{% set s = 'x' %}{% endif %}{{ s }},{% endfor %}",
    "{% set ns = namespace(x=0) %}{% for i in l %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}",
    "{% set ns.x = 1 %}",
    "{% set d.x = 1 %}",
    "{% set ns = namespace() %}{% set ns.a, ns.b = 1, 2 %}{{ ns.a }}{{ ns.b }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{% set ns = namespace(a=1) %}{{ ns['a'] }}{{ ns.b is defined }}{{ ns }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    "{% set a = 1, 2 %}{{ a }}",
    "{% set (a, b) = (1, 2) %}{{ b }}",
    "{% set a %}x{{ n }}y{% endset %}{{ a|upper }}",
    "{% set a | upper %}xyz{% endset %}{{ a }}",
    "{% set a | upper | replace('X','_') %}xyz{% endset %}{{ a }}",
    "{% set a %}{% set b = 5 %}{{ b }}{% endset %}{{ a }}{{ b }}",
    "{% set ns = namespace() %}{% set ns.t %}abc{% endset %}{{ ns.t }}",
    "{% if n > 3 %}a{% elif n > 1 %}b{% else %}c{% endif %}",
    "{% if z %}a{% elif n > 1 %}b{% else %}c{% endif %}",
    "{% if z %}a{% elif e %}b{% else %}c{% endif %}",
    "{% if n %}{% set q = 1 %}{% endif %}{{ q }}",
    "{% if z %}{% set q = 1 %}{% endif %}{{ q }}",
    "{% if z %}{% set s = 1 %}{% endif %}{{ s }}",
    "{% if n %}{% set s = 1 %}{% endif %}{{ s }}",
    "{% if missing %}a{% endif %}{% if missing.x %}{% endif %}",
    "{% macro m(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{{ m(1) }} {{ m(1,3) }} {{ m(b=5,a=4) }} {{ m() }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1,2) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(c=2) }}",
    "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1,2,3,x=4) }}",
    "{% macro m() %}{{ varargs|join(',') }}{% endmacro %}{{ m(*l) }}",
    "{% macro m() %}{{ kwargs.b }}{% endmacro %}{{ m(**{'b':7}) }}",
    "{% macro m(x) %}<{{ caller(x) }}>{% endmacro %}{% call(y) m(3) %}[{{ y }}]{% endcall %}",
    "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}{% call m() %}x{% endcall %}",
    "{% macro m() %}{{ caller() }}{% endmacro %}{{ m() }}",
    "{% macro m() %}{{ caller is defined }}{% endmacro %}{{ m() }}{% call m() %}{% endcall %}",
    "{% macro m() %}x{% endmacro %}{% call m() %}y{% endcall %}",
    "{% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}",
    "{% macro m(a=1, b) %}{% endmacro %}",
    "{% macro m(a, a) %}{% endmacro %}",
    "{% macro m() %}{{ x }}{% endmacro %}{% set x = 3 %}{{ m() }}",
    "{% macro m() %}{{ x }}{% endmacro %}{{ m() }}{% set x = 3 %}",
    "{% macro m() %}{{ n }}{% endmacro %}{{ m() }}{% set n = 3 %}{{ m() }}",
    "{% macro m() %}{% set n = 9 %}{{ n }}{% endmacro %}{{ m() }}{{ n }}",
    "{% macro fact(n) %}{% if n <= 1 %}1{% else %}{{ n * fact(n-1)|int }}{% endif %}{% endmacro %}{{ fact(5) }}",
    "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}B{% endmacro %}{{ a() }}",
    "{% for i in l %}{% macro m() %}{{ i }}{% endmacro %}{{ m() }}{% endfor %}",
    "{% for i in l %}{% macro m() %}{{ i }}{% endmacro %}{% endfor %}{{ m() }}",
    "{% macro m() %}{{ loop is defined }}{% endmacro %}{% for i in l %}{{ m() }}{% endfor %}",
    "{% set ns = namespace() %}{% for i in l %}{% macro m() %}{{ i }}{% endmacro %}{% if loop.first %}{% set ns.m = m %}{% endif %}{{ ns.m() }}{% endfor %}",
    "{% macro m(a) %}{% endmacro %}{{ m }}{{ m.name }}{{ m.arguments }}{{ m.catch_kwargs }}{{ m.catch_varargs }}{{ m.caller }}",
    "{% macro m(caller) %}{{ caller }}{% endmacro %}",
    "{% macro m(caller=1) %}{{ caller }}{% endmacro %}{{ m() }}{{ m(caller=2) }}",
    "{% macro inner() %}({{ caller() }}){% endmacro %}{% macro outer() %}{% call inner() %}{{ caller() }}{% endcall %}{% endmacro %}{% call outer() %}x{% endcall %}",
    "{% macro m(x) %}{{ x }}{{ x is defined }}{% endmacro %}{{ m() }}",
    "{% macro m(x) %}{{ x.y }}{% endmacro %}{{ m() }}",
    "{% filter upper %}abc{{ s }}{% endfilter %}",
    "{% filter replace('a','b')|upper %}aaa{% endfilter %}",
    "{% filter nope %}x{% endfilter %}",
    "{% filter upper %}{% set zz = 1 %}{% endfilter %}{{ zz }}",
    "{% filter indent(2) %}a\nb{% endfilter %}",
    "{% with a=1, b=2 %}{{ a }}{{ b }}{% endwith %}{{ a }}",
    "{% with a=n, n=3 %}{{ a }}{{ n }}{% endwith %}{{ n }}",
    "{% with %}{% set q=1 %}{{ q }}{% endwith %}{{ q }}",
    "{% with (a,b)=(1,2) %}{{ b }}{% endwith %}",
    "{% raw %}{{ x }}{% y %}{# #}{% endraw %}",
    "{% raw -%} a {%- endraw %} b",
    "a {%- raw %} b {% endraw -%} c",
    "{% raw %}\n a\n{% endraw %}\nb",
    "{%+ raw %}x{% endraw +%}\n",
    "  {% raw %}\n  {{ a }}\n  {% endraw %}\n",
    "{%raw%}x{%endraw%}",
    "{% raw %}x",
    "a{# c #}b",
    "a {#- c -#} b",
    "{# c #}\nx",
    "  {# c #}\n x",
    "a{# c",
    "{#-#}x",
    "{#+ c +#}\nx",
    "a {# x #}\n b {# y -#}\n c",
    "{% generation %}x{{ s }}{% endgeneration %}",
    "{% for x in l %}{% generation %}{{ x }}{% set q = x %}{% endgeneration %}{{ q }}{% endfor %}",
    "{% for x in l %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
    "{% generation %}{{ caller }}{% endgeneration %}",
    "{%- generation -%} a {%- endgeneration -%}",
    "{% print n, s %}",
    "{% print %}",
    "{% do l.append(1) %}",
    "{% nope %}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% from 'x' import y %}",
    "{% extends 'x' %}",
    "{% if z %}{% include 'x' %}{% endif %}ok",
    "{% block b %}x{{ n }}{% endblock %}",
    "{% set q = 4 %}{% block b %}{{ q }}{% endblock b %}",
    "{% for i in l %}{% block b %}{{ i }}{% endblock %}{% endfor %}",
    "{% block b %}{% set q=1 %}{% endblock %}{{ q }}",
    "{% block b %}{% endblock %}{% block b %}{% endblock %}",
    "{% autoescape false %}{{ '<' }}{% endautoescape %}",
    "x\n",
    "x\n\n",
    "\nx",
    "x\r\ny\r\n",
    "x\ry",
    "{{ 'a\r\nb' }}",
    "",
    "\n",
    " ",
    "{% if n %}\nx\n{% endif %}\ny",
    "  {% if n %}\n  x\n  {% endif %}\ny",
    "a  {% if n %}b{% endif %}",
    "a\n  {% if n %}b{% endif %}",
    "a\n\t {% if n %}\nb\n {% endif %}\nc",
    "{% if n -%}\n  x  \n{%- endif %}",
    "{%- if n %} x {% endif -%}\n\n  y",
    "{%+ if n %}x{% endif %}",
    "  {%+ if n %}x{%+ endif %}\n z",
    "{% if n +%}\nx{% endif +%}\n z",
    "  {{ n }}  \n  {{- n -}}  \n  y",
    "{{- n }}",
    "a {{- n -}} b",
    "{{ n }}\n{{ n }}\n",
    "{{+ n }}",
    "{{ +n }}",
    "{{-n}}",
    "{{-1}}",
    "{{ -1 }}",
    "{{ n -}} x",
    "{{ n +}}",
    "{{ n }} {%- if n %} x{% endif %}",
    "{% if n %}{# c #}\n  x{% endif %}",
    "{%if n%}x{%endif%}",
    "{%-if n-%} x {%-endif-%}",
    "{% if n %}a{% endif %}\n\n{% if n %}b{% endif %}",
    "   \n  {% set x = 1 %}  \n  {{ x }}",
    "{% set x = 1 %}   \n{{ x }}",
    "{% for x in l %}\n  {{ x }}\n{% endfor %}\n",
    "{% for x in l -%}\n  {{ x }}\n{%- endfor %}\n",
    "\n\n{%- if n %}\n\n\nx{% endif %}",
    "a\n{#- c #}\nb",
    "a\n  {#- c -#}\n  b",
    "\t{% if n %}\t\nx\t{% endif %}\t\n",
    "é{% if n %}é{% endif %}é",
    " {% if n %}x{% endif %}",
    "a\n {% if n %}x{% endif %}",
    "a {%- if n %}x{% endif %}",
    "{{ {'a': {'b': 1}}['a']['b'] }}",
    "{{ {'a':1}.a }}",
    "{{ {'a':1}}}",
    "{{ {'a':{'b':1}}}}",
    "{{ [1,2][0] }}",
    "{{ (1,2)[0] }}",
    "{{ '}}' }}",
    "{{ '{{' }}",
    "{{ \"%}\" }}",
    "{% if '%}' %}x{% endif %}",
    "{{ [ }}",
    "{{ ( }}",
    "{{ ) }}",
    "{{ [) }}",
    "{{ n",
    "{% if n",
    "{% if n %}",
    "{% if n %}x",
    "{% endif %}",
    "{% for x in l %}",
    "{% for x l %}{% endfor %}",
    "{% for 1 in l %}{% endfor %}",
    "{% for x.y in l %}{% endfor %}",
    "{% for in l %}{% endfor %}",
    "{% set 1 = 2 %}",
    "{% set x %}",
    "{% set %}",
    "{% set x = %}",
    "{% set true = 1 %}",
    "{% set x.y.z = 1 %}",
    "{% if %}x{% endif %}",
    "{% if n %}{% else %}{% else %}{% endif %}",
    "{% else %}",
    "{% elif %}",
    "{% macro %}{% endmacro %}",
    "{% macro m %}{% endmacro %}",
    "{% macro m() %}",
    "{% call x %}{% endcall %}",
    "{% endfor %}",
    "{% for x in l %}{% endif %}{% endfor %}",
    "{{ }}",
    "{% %}",
    "{{ n n }}",
    "{{ n; }}",
    "{{ n! }}",
    "{{ n @ 1 }}",
    "{{ $ }}",
    "{{ 'abc }}",
    "{{ \\ }}",
    "{{ n ? 1 : 2 }}",
    "{{ n && 1 }}",
    "{{ n || 1 }}",
    "{{ n | }}",
    "{{ | n }}",
    "{{ n. }}",
    "{{ n.'a' }}",
    "{{ .n }}",
    "{{ n[ }}",
    "{{ n[] }}",
    "{{ n[1 }}",
    "{{ n(,) }}",
    "{{ f(a=1, 2) }}",
    "{{ f(**d, *l) }}",
    "{{ f(a=1,a=2) }}",
    "{{ dict(a=1,) }}",
    "{{ dict(*[], **{}) }}",
    "{{ not }}",
    "{{ and 1 }}",
    "{{ 1 and }}",
    "{{ 1 if }}",
    "{{ 1 in }}",
    "{{ is x }}",
    "{{ x is }}",
    "{{ x is not }}",
    "{{ 1 == }}",
    "{{ a.b.c.d is defined }}",
    "{{ (a|default({})).b is defined }}",
    "{% for loop in l %}{% endfor %}",
    "{% for x in l %}{% set loop = 1 %}{% endfor %}",
    "{% set loop = 1 %}{{ loop }}",
    "{% for x in l %}{{ loop.nope }}{% endfor %}",
    "{% for x in l %}{{ loop }}{% endfor %}",
    "{% for x in l %}{{ loop['index'] }}{% endfor %}",
    "{% for x in n %}{% endfor %}",
    "{% for x in missing %}{% else %}E{% endfor %}",
    "{% for x in missing.y %}{% endfor %}",
    "{% for x in none %}{% endfor %}",
    "{% for x in l|select('odd') %}{{ x }}{{ loop.last }}{{ loop.length }}{% endfor %}",
    "{% for x in l|map('string') %}{{ x }}{{ loop.nextitem }}{% endfor %}",
    "{% set g = l|select('odd') %}{{ g|list }}{{ g|list }}",
    "{% set g = l|map('string') %}{{ 1 in g }}{{ '3' in g }}{{ g|list }}",
    "{% set g = l|map('string') %}{{ g|length }}",
    "{% set g = l|map('string') %}{{ g[0] }}|{{ g|first }}{{ g|first }}{{ g|last }}",
    "{% set g = l|map('string') %}{{ g|first }}{{ g|join }}",
    "{% set g = l|map('string') %}{{ g is iterable }}{{ g is sequence }}{{ g is defined }}{{ g|tojson }}",
    "{% set g = l|reverse %}{{ g|first }}{{ g|list }}",
    "{% if l|select('gt', 100) %}yes{% else %}no{% endif %}",
    "{% if (l|select('gt', 100)|list) %}yes{% else %}no{% endif %}",
    "{{ x|nofilter }}",
    "{% if z %}{{ x|nofilter }}{% endif %}ok",
    "{% if z %}{% for i in l %}{{ x|nofilter }}{% endfor %}{% endif %}ok",
    "{% if n is notest %}{% endif %}",
    "{{ (x|nofilter) if z else 1 }}",
    "{{ 1 if z and (z is notest) else 2 }}",
    "{% for i in [] %}{{ i|nofilter }}{% endfor %}",
    "{% macro m() %}{{ x|nofilter }}{% endmacro %}",
    "{{ range(3)|map('string')|join }}",
    "{% for i in range(3) %}{% for j in range(i) %}{{ i }}{{ j }} {% endfor %}{% endfor %}",
    "{% set x = 1 if n else 2 %}{{ x }}",
    "{% set x = n, s %}{{ x[1] }}",
    "{% set x = [1,2,3] %}{% set x = x + [4] %}{{ x }}",
    "{% set d2 = dict(d, z=1) %}{{ d2.z }}{{ d.z is defined }}",
    "{% set x = namespace(l=[]) %}{% for i in l %}{% set x.l = x.l + [i] %}{% endfor %}{{ x.l }}",
    "{% set x %}{% for i in l %}{{ i }}{% endfor %}{% endset %}{{ x|length }}",
    "{%- for i in l -%} {{ i }} {%- endfor -%}",
    "{% for i in l: %}{{ i }}{% endfor %}",
    "{% if n: %}x{% endif %}",
    "{% for x in l %}{% if loop.first %}{% set foo = 'A' %}{% endif %}{{ foo }}{% endfor %}",
    "{% for x in l %}{{ foo }}{% if loop.first %}{% set foo = 'A' %}{% endif %}{% endfor %}",
    "{% set foo = 0 %}{% for x in l %}{% if x %}{% set foo = foo + x %}{% endif %}{{ foo }}{% endfor %}{{ foo }}",
    "{% for x in l %}{% for y in ls %}{% set q = x ~ y %}{{ q }}{% endfor %}{{ q }}{% endfor %}",
    "{% set a = 1 %}{% if n %}{% for x in l %}{% set a = 2 %}{% endfor %}{{ a }}{% endif %}",
    "{% if n %}{% set a = 1 %}{% for x in l %}{{ a }}{% endfor %}{% endif %}{{ a }}",
    "{% macro m() %}{% if q %}{% set r = 1 %}{% endif %}{{ r }}{% endmacro %}{{ m() }}{% set r = 5 %}{{ m() }}",
    "{% macro m(l) %}{% for i in l %}{{ i }}{% endfor %}{{ i }}{% endmacro %}{{ m([1]) }}{{ m(l) }}",
    "{% set x = 'outer' %}{% macro m() %}{{ x }}{% set x = 'inner' %}{{ x }}{% endmacro %}{{ m() }}{{ x }}",
    "{% set x = 'outer' %}{% call dict() %}{% endcall %}",
    "{{ caller }}",
    "{{ varargs }}{{ kwargs }}",
    "{% set messages = [{'role':'user','content':'hi'}] %}{% for message in messages %}{{ message.role + ': ' + message['content'] }}{% endfor %}",
    "{{ raise_exception('no ' ~ n) }}",
    "{% if z %}{{ raise_exception('x') }}{% endif %}ok",
    "{{ strftime_now('%Y') }}",
    "{{ 'a' if n else raise_exception('x') }}",
    "{{ n }}{{ raise_exception('x') }}",
    "{{ '%s'|format }}",
    "{{ s.split()[1][::-1]|upper }}",
    "{{ l.__class__ }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ d.__init__ }}|",
    "{{ s['__class__'] }}|",
    "{{ d['__class__'] }}|",
    "{{ l|attr('__class__') }}|",
    "{{ range.__globals__ }}",
    "{{ n.__add__(1) }}",
    "{% for k, v in d|dictsort %}{{ k }}{{ v }}{% endfor %}",
    "{% for g in ld|groupby('g') %}{{ g.grouper }}{{ g.list|length }}{{ g[0] }}{% endfor %}",
    "{% for k, items in ld|groupby('g') %}{{ k }}{{ items|map(attribute='n')|join }}{% endfor %}",
    "{{ '{% x %}' }}",
    "{% set x = '{{ y }}' %}{{ x }}",
    "{{ [1,\n2,\n3] }}",
    "{{ {\n'a': 1,\n'b': 2\n} }}",
    "{%\nif n\n%}x{%\nendif\n%}",
    "{{\nn\n}}",
    "{{n}}{{s}}",
    "{{ n}}",
    "{{n }}",
    "{{ 1if n else 2 }}",
    "{{ 1 if(n)else 2 }}",
    "{{ not(n) }}",
    "{{ n is not(none) }}",
    "{{ n==5and s }}",
    "{{ 5.5.5 }}",
    "{{ 1..2 }}",
    "{{ 1.e5 }}",
    "{{ 01 }}",
    "{{ 00 }}",
    "{{ 1__0 }}",
    "{{ 0x }}",
    "{{ 0b2 }}",
    "{{ 1_ }}",
    "{{ é }}",
    "{{ n°2 }}",
    "{{ 名前 }}",
    "{% set 名前 = 1 %}{{ 名前 }}",
    "{{ _x }}",
    "{{ __x__ }}",
    "{% set _x = 1 %}{{ _x }}",
    "{{ none|default('x') }}{{ none|default('x', true) }}",
    "{{ d.items()|list|length }}",
    "{{ (d.items()|list)[1][0] }}",
    "{{ d|length }}{{ d.keys()|length }}",
    "{% set x = d.copy() %}{{ x == d }}{{ x is sameas d }}",
    "{{ 5 is sameas 5 }}{{ none is sameas none }}",
    "{{ 'abc'[1] }}{{ 'abc'['1'] }}",
    "{{ s|replace('o', n) }}",
    "{{ s|replace(5, 6) }}",
    "{{ [1,2]|replace('1','9') }}",
    "{{ missing.foo }}",
    "{{ missing['foo'] }}",
    "{{ d.zz.foo }}",
    "{{ d['zz']['foo'] }}",
    "{{ l[99].foo }}",
    "{{ (missing|default({})).foo }}",
    "{{ s.zz() }}",
    "{{ missing() }}",
    "{{ n() }}",
    "{{ s() }}",
    "{{ 'a'.upper()() }}",
    "{{ l.0.1 }}",
    "{{ x.y if x is defined else 'no' }}",
    "{{ x.y is defined if x else 'no' }}",
    "{{ x is defined and x.y }}",
    "{{ not x or x.y }}",
    "{{ 'a\\\nb' }}",
]
