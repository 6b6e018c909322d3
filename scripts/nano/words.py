"""Small tables of facts for the generated conversations."""

CAPITALS = dict(
    line.split(":") for line in
    """France:Paris|Germany:Berlin|Italy:Rome|Spain:Madrid|Portugal:Lisbon|Greece:Athens
Austria:Vienna|Poland:Warsaw|Sweden:Stockholm|Norway:Oslo|Finland:Helsinki|Denmark:Copenhagen
Ireland:Dublin|Hungary:Budapest|Romania:Bucharest|Bulgaria:Sofia|Belgium:Brussels|Russia:Moscow
Ukraine:Kyiv|Turkey:Ankara|Egypt:Cairo|Kenya:Nairobi|Ghana:Accra|Ethiopia:Addis Ababa
Morocco:Rabat|Nigeria:Abuja|Tunisia:Tunis|Senegal:Dakar|Japan:Tokyo|China:Beijing|India:New Delhi
Thailand:Bangkok|Vietnam:Hanoi|Nepal:Kathmandu|Iran:Tehran|Iraq:Baghdad|Israel:Jerusalem
Jordan:Amman|Lebanon:Beirut|South Korea:Seoul|Indonesia:Jakarta|Canada:Ottawa|Mexico:Mexico City
Cuba:Havana|Peru:Lima|Chile:Santiago|Brazil:Brasilia|Argentina:Buenos Aires|Colombia:Bogota
Ecuador:Quito|Uruguay:Montevideo|Venezuela:Caracas|Australia:Canberra|New Zealand:Wellington
Iceland:Reykjavik|Croatia:Zagreb|Serbia:Belgrade|Latvia:Riga|Estonia:Tallinn""".replace("\n", "|").split("|"))

OPPOSITES = [tuple(p.split(":")) for p in
    """hot:cold big:small fast:slow up:down left:right day:night open:closed happy:sad
full:empty hard:soft light:dark old:new early:late high:low long:short loud:quiet rich:poor
strong:weak wet:dry young:old near:far true:false good:bad black:white first:last inside:outside
clean:dirty deep:shallow easy:difficult thick:thin sweet:sour smooth:rough wide:narrow win:lose
buy:sell push:pull begin:end love:hate give:take always:never above:below before:after
north:south east:west summer:winter friend:enemy question:answer heavy:light-weight
tall:short brave:afraid asleep:awake safe:dangerous cheap:expensive""".split()]

PLURALS = dict(p.split(":") for p in
    """cat:cats dog:dogs book:books tree:trees car:cars house:houses apple:apples box:boxes
fox:foxes bus:buses glass:glasses dish:dishes wish:wishes watch:watches church:churches baby:babies
city:cities story:stories lady:ladies berry:berries party:parties fly:flies leaf:leaves wolf:wolves
knife:knives wife:wives life:lives half:halves shelf:shelves child:children man:men woman:women
foot:feet tooth:teeth goose:geese mouse:mice person:people sheep:sheep fish:fish deer:deer
potato:potatoes tomato:tomatoes hero:heroes key:keys toy:toys day:days boy:boys horse:horses
bird:birds river:rivers table:tables chair:chairs window:windows garden:gardens flower:flowers
bridge:bridges orange:oranges pencil:pencils letter:letters number:numbers brush:brushes""".split())

ANIMAL_SOUNDS = dict(p.split(":") for p in
    """dog:bark cat:meow cow:moo duck:quack sheep:baa horse:neigh pig:oink lion:roar wolf:howl
bee:buzz owl:hoot frog:croak snake:hiss mouse:squeak rooster:crow bird:chirp""".split())

COLORS = dict(p.split(":") for p in
    """grass:green snow:white coal:black banana:yellow sky:blue blood:red lemon:yellow
tomato:red milk:white chocolate:brown cloud:white leaf:green strawberry:red night:black
carrot:orange sun:yellow pumpkin:orange frog:green cherry:red salt:white""".split())

DEFINITIONS = dict(line.split(": ", 1) for line in
    """apple: a round fruit that grows on a tree
river: a long stream of water that flows to the sea
mountain: a very high piece of land
ocean: a very large area of salt water
island: a piece of land with water all around it
desert: a dry place with little rain
forest: a large area covered with trees
bridge: something built to cross a river or a road
hammer: a tool used to hit nails
clock: a thing that shows the time
teacher: a person who helps others learn
doctor: a person who takes care of sick people
farmer: a person who grows food and keeps animals
baker: a person who makes bread and cakes
pilot: a person who flies a plane
library: a place where many books are kept
school: a place where children learn
hospital: a place where sick people are treated
kitchen: a room where food is cooked
garden: a piece of land where plants are grown
window: an opening in a wall that lets in light
umbrella: a thing that keeps you dry in the rain
mirror: a glass that shows your own image
ladder: a set of steps used to climb up
candle: a stick of wax that burns and gives light
pencil: a thin stick used to write or draw
kitten: a young cat
puppy: a young dog
winter: the coldest part of the year
summer: the warmest part of the year
snow: soft white ice that falls from the sky
thunder: the loud sound that follows lightning
rainbow: an arc of colors in the sky after rain
planet: a large body that moves around a star
star: a huge ball of hot gas that gives light
moon: the body that moves around the Earth
computer: a machine that works with data and programs
program: a list of instructions for a computer
algorithm: a list of steps that solves a problem
token: a small piece of text that a language model reads
tokenizer: the part that cuts text into tokens
prompt: the text that is given to a language model
expert: one of many small networks inside a mixture of experts
router: the part that chooses which experts work on a token
cache: a store that keeps results so that they can be used again
prefill: the phase in which a model reads the whole prompt
decode: the phase in which a model writes one token after another
logit: the raw score of a token before it becomes a probability
server: a program that answers requests from clients
client: a program that sends requests to a server
endpoint: an address on a server that answers one kind of request
triangle: a shape with three sides
square: a shape with four equal sides
circle: a round shape
week: a period of seven days
year: a period of twelve months
breakfast: the first meal of the day
honey: a sweet food that bees make
bread: a food made of flour and water and baked in an oven
music: sounds put together so that they are nice to hear""".split("\n"))

WORDS = """apple river house table chair water stone green black white brown happy light night
plant tree bird horse mouse sheep tiger zebra lemon melon grape peach bread butter cheese sugar salt
soup rice pasta paper pencil book letter number window door floor wall roof garden flower leaf
forest mountain ocean island desert beach cloud rain snow storm wind summer winter spring planet moon
star sun earth fire smoke metal silver gold copper iron glass cotton wool silk shirt shoes hat
coat scarf belt clock watch mirror candle lamp radio phone camera engine wheel train plane ship boat
truck car bus road bridge tower castle school church market bank office farm field barn fence
doctor nurse teacher baker farmer pilot sailor king queen prince knight friend family mother father
sister brother uncle cousin baby child woman music song dance drum piano guitar violin flute paint
color shape circle square triangle line point story poem word page print ink brush hammer nail
screw ladder rope chain box bag cup plate bowl fork spoon knife bottle basket monkey rabbit
turtle spider eagle parrot dolphin whale shark salmon frog snake lion bear wolf fox deer goat camel
donkey kitten puppy chicken duck goose turkey honey orange banana cherry potato carrot onion garlic
pepper tomato pumpkin memory token model expert router server client kernel cache thread""".split()

NAMES = """Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Lily Mark Mia Noah
Nina Oscar Olivia Paul Peter Rosa Ruth Sam Sara Simon Sofia Tom Tara Victor Vera Will Zoe Adam Alice
Carl Daisy Eva Fred Hanna Ivan Julia Karl Laura Max Nora Otto Rita Tim""".split()

CITIES = """Paris London Berlin Rome Madrid Vienna Oslo Dublin Prague Athens Tokyo Seoul Delhi
Cairo Lima Boston Chicago Denver Toronto Sydney Moscow Lisbon Warsaw Geneva Munich Milan""".split()

FAVORITES = {
    "color": "red blue green yellow orange purple pink brown black white".split(),
    "animal": "dog cat horse rabbit fox owl bear wolf duck lion".split(),
    "food": "pizza soup bread rice pasta cheese salad cake fish honey".split(),
    "fruit": "apple banana cherry grape lemon melon orange peach".split(),
    "season": "spring summer autumn winter".split(),
    "sport": "football tennis chess swimming running skiing".split(),
}

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = ("January February March April May June July August September October November "
          "December").split()

# Things beyond the model's world: it must say so.
BEYOND = """quantum physics|the French Revolution|black holes|the stock market|inflation
machine translation|the theory of relativity|Shakespeare|the Roman Empire|photosynthesis|evolution
climate change|the meaning of life|philosophy|world politics|the last election|football results
the weather tomorrow|bitcoin|tax law|medicine|heart disease|vaccines|chemistry|organic chemistry
the periodic table|calculus|differential equations|linear algebra|number theory|the Second World War
ancient Egypt|Beethoven|modern art|poetry of the nineteenth century|the human brain|genetics
the history of Japan|economics|marketing|travel plans|cooking a turkey|car repair|job interviews
cover letters|diets|dreams|horoscopes|gossip|celebrities|movies|the news|today's headlines
space travel|Mars|dinosaurs|volcanoes|earthquakes|deep sea fish|nuclear power|solar panels
electric cars|compilers|operating systems|cryptography|blockchain|video games|anime
Dostoevsky|the Bible|religion|ethics|law|divorce|loans|mortgages|insurance""".replace("\n", "|").split("|")
